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
from areno.engine.spec import EngineSpec, RolloutStats
from areno.errors import EngineError, Key, WorkerLost
from areno.types import GenerationOutput

if TYPE_CHECKING:
    from areno.engine.worker import Worker


class InlineGroup:
    """A group with one worker, which runs inside the driver's own process. It has the methods of SpawnedGroup.

    Args:
        spec: Description of the worker.

    Attributes:
        spec: Description of the worker.
        command: Name of the method that the worker executes. Empty if it executes none.
        heartbeats: None, since there are no worker processes.
        watchdog: Thread that interrupts the driver if it makes no progress.
    """

    heartbeats: None = None  # see Watched

    def __init__(self, spec: EngineSpec):
        self.spec, self.command = spec, "start"
        self._worker: Worker | None = None
        self._end: Callable[[], None] | None = None  # undoes the settings made in this process
        # Another thread may call `cast` while this thread decodes, so the command waits for the next `poll` or `call`.
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
        """Execute queued commands, then call a method on the worker.

        Args:
            method: Name of the method.
            *args: Positional arguments.

        Returns:
            A list with one element, the result of the method.

        Raises:
            EngineError: The engine is closed.
        """
        self._run_casts()
        return [self._execute(method, args)]

    def _execute(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method on the worker, and report it as the current command to the watchdog."""
        heartbeat.beat()
        self.command = method
        try:
            with heartbeat.working(method):
                return execute(self.worker, method, args)
        finally:
            self.command = ""

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on the worker with the first tuple of arguments.

        Args:
            method: Name of the method.
            args: A list with one tuple of positional arguments, since there is only one data-parallel rank.

        Returns:
            A list with one element, the result of the method.
        """
        return self.call(method, *args[0])

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        """Queue a command, which the next `poll` or `call` executes. Any thread may call this.

        If the command fails, the `poll` or `call` that executes it raises the error.

        Args:
            dp_rank: Ignored, since there is only one rank.
            method: Name of the worker's method.
            *args: Positional arguments.
        """
        self._inbox.put((method, args))

    def _run_casts(self) -> None:
        """Execute the commands that `cast` has queued."""
        while not self._inbox.empty():
            method, args = self._inbox.get()
            self._execute(method, args)

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Decode until there are new outputs of finished samples, or partial outputs, and return them.

        Args:
            timeout: Longest time to decode without a new output, in seconds.

        Returns:
            The outputs. The list is empty after the timeout, or if there are no requests.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._run_casts()
            if not self.worker.has_work:
                return []
            if (outputs := self._execute("step", ())) or time.monotonic() > deadline:
                return outputs

    def stats(self) -> list[RolloutStats]:
        """Return a list with the latest decoding statistics of the worker."""
        return [self.worker.rollout_stats()]

    def host_bytes(self) -> int:
        """Return 0, since the worker has no process of its own."""
        return 0

    def close(self) -> None:
        """Close the worker, which frees its device. Closing twice has no effect."""
        self.watchdog.stop()
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        if self._end is not None:
            self._end()
        self._end = None

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        """Return an empty dictionary, since the group has no worker processes."""
        return {}

    def name(self, rank: int) -> str:
        """Return the worker's name as text, for messages."""
        return f"worker {rank}"

    def mark_lost(self, error: WorkerLost) -> None:
        """Do nothing, since there is no worker process to kill. `error` is ignored."""


WorkerGroup = InlineGroup | SpawnedGroup


def start_workers(spec: EngineSpec, mode: str, again: bool = False) -> WorkerGroup:
    """Start the workers described by a spec.

    Args:
        spec: Description of the workers.
        mode: The setting `engine.workers`: "inline" for a worker inside this process, "spawn" for a process per device,
            or "auto", which is inline for one CPU device and otherwise spawn. "ray" starts processes on a Ray cluster.
        again: Whether this is a restart after an earlier group has lost a worker. With "ray", fewer copies of the model
            may then start if nodes are gone.

    Returns:
        The group. Its `spec` describes the workers that were started, with their hosts.

    Raises:
        EngineError: `mode` is "inline" and the spec has several devices.
        ConfigError: `mode` is "ray" and the cluster has too few nodes or devices.
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
