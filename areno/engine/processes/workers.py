"""The two kinds of worker groups: one worker inside the driver's process, or one process for each device.

InlineGroup and SpawnedGroup have the same methods. An inline worker starts fast and is easy to debug.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from areno import heartbeat
from areno.engine.processes.messages import execute
from areno.engine.processes.spawned import SpawnedGroup
from areno.engine.processes.watchdog import Watchdog
from areno.engine.reports import RolloutStats
from areno.errors import EngineError, Key, WorkerLost
from areno.specs.engine import EngineSpec
from areno.types import GenerationOutput

if TYPE_CHECKING:
    from areno.engine.worker import Worker


class InlineGroup:
    """A group with one worker, which runs inside the driver's own process. It has the methods of SpawnedGroup."""

    heartbeats: None = None  # see WatchedGroup

    def __init__(self, spec: EngineSpec):
        self.spec, self.command = spec, "start"
        self._worker: Worker | None = None
        self._end: Callable[[], None] | None = None  # undoes the settings made in this process
        # Another thread may use `call_nowait` while this one decodes; the command waits for the next `poll` or `call`.
        self._inbox: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self.watchdog = Watchdog(spec.engine.stall_timeout_s, self)
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

        if spec.engine.deterministic:
            begin_deterministic(spec.devices[0], spec.world_size)
            self._end = end_deterministic
        self._worker = Worker(spec, join_groups(spec, 0))

    @property
    def worker(self) -> Any:
        """The worker object. Raises EngineError once the engine is closed."""
        if self._worker is None:
            raise EngineError("the engine is closed")
        return self._worker

    def call(self, method: str, *args: Any) -> list[Any]:
        self._run_queued_calls()
        return [self._execute(method, args)]

    def _execute(self, method: str, args: Sequence[Any]) -> Any:
        heartbeat.beat()
        self.command = method
        try:
            with heartbeat.working(method):
                return execute(self.worker, method, args)
        finally:
            self.command = ""

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.call(method, *args[0])

    def call_nowait(self, dp_rank: int, method: str, *args: Any) -> None:
        """Queue a command, which the next `poll` or `call` executes. Any thread may call this."""
        self._inbox.put((method, args))

    def _run_queued_calls(self) -> None:
        while not self._inbox.empty():
            method, args = self._inbox.get()
            self._execute(method, args)

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Decode until there are new outputs, no requests, or `timeout` seconds have passed."""
        deadline = time.monotonic() + timeout
        while True:
            self._run_queued_calls()
            if not self.worker.has_work:
                return []
            if (outputs := self._execute("step", ())) or time.monotonic() > deadline:
                return outputs

    def stats(self) -> list[RolloutStats]:
        return [self.worker.rollout_stats()]

    def host_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.watchdog.stop()
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        if self._end is not None:
            self._end()
        self._end = None

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        return {}

    def worker_name(self, rank: int) -> str:
        return f"worker {rank}"

    def mark_lost(self, error: WorkerLost) -> None:
        """Do nothing, since there is no worker process to kill."""


WorkerGroup = InlineGroup | SpawnedGroup


def start_workers(spec: EngineSpec, mode: str, again: bool = False) -> WorkerGroup:
    """Start workers as `engine.workers` (`mode`) says. "auto" means inline for one CPU device, otherwise spawn.

    `again` means a restart after a worker was lost. If nodes are gone, "ray" may then start fewer data-parallel
    replicas. The `spec` of the group describes the workers that were started.
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
