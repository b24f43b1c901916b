"""Keep a pool of processes that run user code.

`WorkerPool` starts the processes together, sends them calls, and replaces those that end or hang. Reward functions and
agents derive their pools from it. `default_workers` chooses the number of processes by the cores of the machine.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from areno import heartbeat
from areno.config.rollout import AgentConfig, RewardConfig
from areno.errors import ConfigError, EngineError, Key, Problem
from areno.user_processes.worker import Output, Worker

_CGROUP = Path("/sys/fs/cgroup")
MIN_WORKERS, MAX_WORKERS = 2, 64
"""At least two, so that one hanging process does not block all calls. Each takes memory and time to start."""


def default_workers(n_devices: int = 0, cgroup: Path = _CGROUP) -> int:
    """Return the default number of processes.

    The usable cores count, less one for the driver and one for each device's worker.

    Args:
        n_devices: Number of devices.
        cgroup: Folder of the container's limits.
    """
    return min(MAX_WORKERS, max(MIN_WORKERS, usable_cores(cgroup) - 1 - n_devices))


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the cores that this process may use: those it is bound to, and at most its container's share of CPU time.

    Args:
        cgroup: Folder of the container's limits.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """Return the container's limit on CPU time, in cores. Infinite without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return math.inf


Config = TypeVar("Config", RewardConfig, AgentConfig)
Self = TypeVar("Self", bound="WorkerPool[Any]")  # typing has it from Python 3.11 on
Failure = Literal["error", "timeout"]

IMPORT_LIMIT_S = 180.0  # an import may compile or download something, but a hang must end
SLOW_S = 10.0  # waiting for longer is logged, then again each time that it has doubled
_POLL_S = 0.5


class Work(Protocol):
    """The calls that a pool makes for one request of the driver.

    Attributes:
        n_open: Number of calls without an outcome.
    """

    n_open: int

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        """Return calls for an idle process.

        Args:
            n_workers: Number of processes of the pool.
            is_async: Whether the user's function is async.

        Returns:
            (number of the call, pickled arguments) of each call. Empty if all calls have been sent.
        """
        ...

    def answered(self, position: int, answer: tuple[Any, ...]) -> None:
        """Record the answer to one call.

        Args:
            position: Number of the call.
            answer: The answer of the process.
        """
        ...

    def lost(self, worker: Worker, status: Failure, text: str) -> None:
        """Handle the end of a process that had calls left in `worker.chunk`.

        Args:
            worker: The process. It has ended, or was killed because it did not answer in time.
            status: "timeout" if it did not answer in time, else "error".
            text: Description of the failure.
        """
        ...


class WorkerPool(Generic[Config]):
    """Base class of the pools of processes that call user code. Use it in a `with` block.

    Start it early: the processes import the user code while other work goes on.

    Args:
        config: The section of the configuration.
        name: Name of the functions, for messages.
        n_workers: Number of processes. None takes `config.workers`.

    Attributes:
        section: "reward" or "agent", the name of the configuration section and of the logger.
        module: Module whose `serve` the processes run.
        ended_text: Message of a process that ended, with {} for how.
        late_text: Message of a process that did not answer in time, with {} for the limit in seconds.
        import_text: Message of a process that ended while it started, with {} for how.
        output: Logs the lines that the processes print.
        workers: The processes.
    """

    section: ClassVar[str]
    module: ClassVar[str]
    ended_text: ClassVar[str]
    late_text: ClassVar[str]
    import_text: ClassVar[str]

    def __init__(self, config: Config, name: str, n_workers: int | None = None):
        self.config, self.name = config, name
        self.n_workers: int = n_workers or config.workers or 1
        self._key = f"{self.section}.fn"
        self.output = Output(self.section)
        self._logger = logging.getLogger(f"areno.{self.section}s")
        self._first_message: tuple[Any, ...] = ()
        self.workers: list[Worker] = []

    def start(self) -> None:
        """Start the processes without waiting for their imports.

        Raises:
            ConfigError: If the file of the user code is missing or does not parse.
            EngineError: If the system does not allow so many processes.
        """
        self._first_message = self._build_first_message()
        try:
            for _ in range(self.n_workers):
                self.workers.append(self._start_worker())
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            n_started, limit = len(self.workers), Key(f"{self.section}.workers")
            self.close()
            text = "{} process {} of {} cannot be started: {}; lower {}"
            raise EngineError(text, self.section, n_started + 1, self.n_workers, error, limit) from error

    def wait_ready(self) -> None:
        """Wait until every process has imported the user code.

        Raises:
            ConfigError: If a process cannot import it. The message names the setting.
        """
        slow = SlowTimer()
        while starting := [worker for worker in self.workers if worker.is_starting]:
            self._wait(starting, None)
            heartbeat.beat()
            if slow.is_due():
                self._logger.info("%s: importing %s takes %.0f s so far", self._key, self.name, slow.seconds)

    def close(self) -> None:
        """End the processes and all processes that they started."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.end()
        self.workers = []

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _build_first_message(self) -> tuple[Any, ...]:
        """Return the first message for each process: the user code and its options. Raises ConfigError."""
        raise NotImplementedError

    def _start_worker(self) -> Worker:
        """Start a process."""
        return Worker(self._first_message, IMPORT_LIMIT_S, self.module, self.output)

    def _run_calls(self, work: Work, look: Callable[[], object]) -> None:
        """Make calls until each has an outcome. `look` is called meanwhile, at least every half second."""
        if not self.workers:
            raise EngineError("the {} processes are not running; call start() first", self.section)
        try:
            while work.n_open:
                self.send_calls(work)
                self.wait(work)
                heartbeat.beat()  # this loop enforces the time limit of the calls, so waiting is no hang
                look()
        except BaseException:
            self.drop_calls()  # a late answer would be taken for the answer to a later call
            raise

    def send_calls(self, work: Work) -> None:
        """Send calls to each idle process, as long as there are any.

        Args:
            work: The calls.
        """
        for worker in self.workers:
            if worker.is_idle:
                worker.send(work.next_chunk(len(self.workers), worker.is_async), self.config.timeout_s)

    def wait(self, work: Work, wake: Connection | None = None, max_s: float = _POLL_S) -> None:
        """Wait until a process answers or is out of time, and handle it.

        Args:
            work: The calls.
            wake: A message on this connection ends the wait.
            max_s: The most seconds to wait.
        """
        self._wait([worker for worker in self.workers if not worker.is_idle], work, wake, max_s)

    def drop_calls(self) -> None:
        """Kill the busy processes and start new ones in their place."""
        for worker in self.workers:
            if worker.chunk:
                self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        """Kill a process and start another one in its place."""
        worker.end()
        self.workers[self.workers.index(worker)] = self._start_worker()

    def _wait(
        self, workers: list[Worker], work: Work | None, wake: Connection | None = None, max_s: float = _POLL_S
    ) -> None:
        """Wait for `workers`, as `wait` does."""
        timeout_s = min([max_s, *(max(0.0, worker.deadline - time.monotonic()) for worker in workers)])
        connections = [worker.connection for worker in workers]
        ready = readable(connections if wake is None else [*connections, wake], timeout_s)
        if wake in ready and wake is not None:
            wake.recv_bytes()
        for worker in workers:
            if worker.connection in ready:
                self._receive(worker, work)
            elif time.monotonic() >= worker.deadline and not readable([worker.connection]):
                self._lost(worker, work, "timeout", self.late_text.format(self.config.timeout_s))

    def _receive(self, worker: Worker, work: Work | None) -> None:
        """Handle the messages of a process, or its end."""
        while readable([worker.connection]):
            try:
                kind_or_position, value = worker.connection.recv()
            except (EOFError, OSError):
                return self._lost(worker, work, "error", self.ended_text.format(worker.exit_text()))
            if kind_or_position == "failed":
                raise ConfigError(value)
            if kind_or_position == "ready":
                worker.is_starting, worker.is_async, worker.deadline = False, value, math.inf
            elif work is not None:
                worker.answered(kind_or_position, self.config.timeout_s)
                work.answered(kind_or_position, value)

    def _lost(self, worker: Worker, work: Work | None, status: Failure, text: str) -> None:
        """Replace a process that died or hangs, and let the work handle its calls."""
        if worker.is_starting:
            hangs = f"importing it took more than {IMPORT_LIMIT_S:g} s"
            why = hangs if status == "timeout" else self.import_text.format(text)
            raise ConfigError(Problem(self._key, f"{self.name}: {why}"))
        self._replace(worker)
        if work is not None:
            work.lost(worker, status, text)


def readable(connections: Iterable[Connection], timeout_s: float = 0.0) -> set[Connection]:
    """Return the connections that have something to read or are closed.

    Does the same as multiprocessing.connection.wait in a fifth of its time.

    Args:
        connections: Connections to look at.
        timeout_s: The most seconds to wait for the first of them.
    """
    poll, by_number = select.poll(), {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(math.ceil(1000 * timeout_s))}


class SlowTimer:
    """Clock that is due when waiting has become long, and again each time that it has doubled."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._due_at = self._started + SLOW_S

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def is_due(self) -> bool:
        """Return whether the wait should be logged now."""
        if time.monotonic() < self._due_at:
            return False
        self._due_at = self._started + 2 * self.seconds
        return True
