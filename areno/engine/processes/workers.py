"""One worker in the driver's own process, which starts fast and is easy to debug.

The forms of a group of workers: one worker in the driver's process, or a process for each device, here or elsewhere.

They have the same methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from areno import heartbeat
from areno.engine.processes.messages import obey
from areno.engine.processes.spawned import SpawnedGroup
from areno.engine.processes.watchdog import Watchdog
from areno.engine.spec import EngineSpec, RolloutStats
from areno.errors import EngineError, Key, WorkerLost
from areno.types import GenerationOutput

if TYPE_CHECKING:
    from areno.engine.worker import Worker


class InlineGroup:
    """One worker in this process. The docstrings of its methods hold for SpawnedGroup, too."""

    pulses: None = None  # see Watched

    def __init__(self, spec: EngineSpec):
        self.spec, self.command = spec, "start"
        self._worker: Worker | None = None
        self._end: Callable[[], None] | None = None  # of what was set in this process
        # Another thread may send while this one decodes, so what is cast waits for the next poll or call.
        self._inbox: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self.watchdog = Watchdog(spec.stall_timeout_s, self)
        try:
            with heartbeat.working("start"):
                self._start(spec)
        except BaseException:
            self.close()
            raise
        self.command = ""

    def _start(self, spec: EngineSpec) -> None:
        from areno.engine.deterministic import begin_deterministic, end_deterministic
        from areno.engine.processes.process_groups import join_groups
        from areno.engine.worker import Worker  # imports torch

        if spec.deterministic:
            begin_deterministic(spec.devices[0], spec.world_size)
            self._end = end_deterministic
        self._worker = Worker(spec, join_groups(spec, 0))

    @property
    def worker(self) -> Any:
        if self._worker is None:
            raise EngineError("the engine is closed")
        return self._worker

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run a method on every worker; the results of each data-parallel rank, in order."""
        self._run_casts()
        return [self._obey(method, args)]

    def _obey(self, method: str, args: Sequence[Any]) -> Any:
        heartbeat.beat()
        self.command = method
        try:
            with heartbeat.working(method):
                return obey(self.worker, method, args)
        finally:
            self.command = ""

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Like call, with other arguments for each data-parallel rank."""
        return self.call(method, *args[0])

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        """Send without waiting for an answer. An error is raised by a later poll or call. Any thread may call this."""
        self._inbox.put((method, args))

    def _run_casts(self) -> None:
        while not self._inbox.empty():
            method, args = self._inbox.get()
            self._obey(method, args)

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """What the decoders returned: finished samples and partial ones, or nothing after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._run_casts()
            if not self.worker.has_work:
                return []
            if (outputs := self._obey("step", ())) or time.monotonic() > deadline:
                return outputs

    def stats(self) -> list[RolloutStats]:
        """The latest counters of each data-parallel rank."""
        return [self.worker.rollout_stats()]

    def close(self) -> None:
        """Free devices and end processes; may be called again."""
        self.watchdog.stop()
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        if self._end is not None:
            self._end()
        self._end = None

    def look(self) -> dict[int, tuple[str, str]]:
        """See Watched."""
        return {}

    def name(self, rank: int) -> str:
        """See Watched."""
        return f"worker {rank}"

    def lose(self, error: WorkerLost) -> None:
        """See Watched: there is no process to kill."""


WorkerGroup = InlineGroup | SpawnedGroup


def start_workers(spec: EngineSpec, mode: str, again: bool = False) -> WorkerGroup:
    """The group for a spec. Its own `spec` is what it has become of the given one.

    mode: engine.workers, that is auto (inline for one CPU device), inline or spawn; or ray, on the nodes of a Ray
    cluster. again: a group of this spec has lost a worker. Where its nodes are gone, there may be fewer copies of the
    model.
    """
    if mode == "ray":
        from areno.engine.processes.ray_workers import RayProcesses

        return SpawnedGroup(spec, partial(RayProcesses, again=again))
    if mode == "inline" and spec.world_size > 1:
        raise EngineError(
            "{}=inline holds one device, not {}; use spawn", Key("engine.workers"), ", ".join(spec.devices)
        )
    if mode == "inline" or (mode == "auto" and spec.devices == ["cpu"]):
        return InlineGroup(spec)
    return SpawnedGroup(spec)
