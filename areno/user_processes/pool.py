"""How many reward processes a machine has cores for.

Some processes of users' code: started together, waited for, and replaced when they end or hang.
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
FEWEST, MOST = 2, 64
"""One process that hangs does not hold up all others; each takes memory, and time to start."""


def default_workers(n_devices: int = 0, cgroup: Path = _CGROUP) -> int:
    """The cores of this process, less one for the driver and one for each device's worker."""
    return min(MOST, max(FEWEST, usable_cores(cgroup) - 1 - n_devices))


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may use: those it is bound to, and no more than its container's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """Cores' worth of time that a container gives its processes; infinite without a limit."""
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

_IMPORT_LIMIT_S = 180.0  # an import may compile or download something, but a hang must end
_SLOW_S = 10.0  # waiting for longer is told, then again each time that it has doubled
_LOOK_S = 0.5


class Work(Protocol):
    """What a pool is asked to do: numbered calls of the user's function. n_open: without an outcome."""

    n_open: int

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        """What an idle process gets: numbers and pickled arguments; nothing if all have been dealt out."""
        ...

    def answered(self, position: int, answer: tuple[Any, ...]) -> None:
        """A process has sent the answer to one call."""
        ...

    def lost(self, worker: Worker, status: Failure, text: str) -> None:
        """A process has ended, or was ended because it hangs, over what is left of `worker.chunk`."""
        ...


class WorkerPool(Generic[Config]):
    """Processes that call the user's code. Start it early: they import it beside other work.

    noun: what its settings and its logger are called after. serves: the module that the processes run. ended, late,
    importing: how messages say that a process ended, that it gave no answer in time, and that it ended while it
    started. name: of the functions, for messages. n_workers: how many processes; None is config.workers. output: logs
    what they print.
    """

    noun: ClassVar[str]
    serves: ClassVar[str]
    ended: ClassVar[str]
    late: ClassVar[str]
    importing: ClassVar[str]

    def __init__(self, config: Config, name: str, n_workers: int | None = None):
        self.config, self.name = config, name
        self.n_workers: int = n_workers or config.workers or 1
        self._key = f"{self.noun}.fn"
        self.output = Output(self.noun)
        self._logger = logging.getLogger(f"areno.{self.noun}s")
        self._first_message: tuple[Any, ...] = ()
        self._workers: list[Worker] = []

    def start(self) -> None:
        """Start the processes and return at once. Raises ConfigError if the file is missing or does not parse.

        EngineError if the system does not let so many processes start.
        """
        self._first_message = self._opening()
        try:
            for _ in range(self.n_workers):
                self._workers.append(self._start_worker())
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            n_started, limit = len(self._workers), Key(f"{self.noun}.workers")
            self.close()
            text = "{} process {} of {} cannot be started: {}; lower {}"
            raise EngineError(text, self.noun, n_started + 1, self.n_workers, error, limit) from error

    def wait_ready(self) -> None:
        """Wait until every process has imported the function. Raises ConfigError, of its setting, if one cannot."""
        slow = Slow()
        while starting := [worker for worker in self._workers if worker.is_starting]:
            self._wait(starting, None)
            heartbeat.beat()
            if slow.is_due():
                self._logger.info("%s: importing %s takes %.0f s so far", self._key, self.name, slow.seconds)

    def close(self) -> None:
        """End the processes and all processes that they started."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _opening(self) -> tuple[Any, ...]:
        """What each process is sent first: the user's code, and what else it needs. Raises ConfigError."""
        raise NotImplementedError

    def _start_worker(self) -> Worker:
        return Worker(self._first_message, _IMPORT_LIMIT_S, self.serves, self.output)

    def _do(self, work: Work, look: Callable[[], object]) -> None:
        """Deal the calls out until each has an outcome. look: called meanwhile, at least every half second."""
        if not self._workers:
            raise EngineError("the {} processes are not running; call start() first", self.noun)
        try:
            while work.n_open:
                self.deal(work)
                self.wait(work)
                heartbeat.beat()  # however long a call may take, it has a limit, which is kept here
                look()
        except BaseException:
            self.drop_calls()  # a late answer would be taken for one of the next call
            raise

    def deal(self, work: Work) -> None:
        """Give each idle process something to do, as long as there is some."""
        for worker in self._workers:
            if worker.is_idle:
                worker.send(work.next_chunk(len(self._workers), worker.is_async), self.config.timeout_s)

    def wait(self, work: Work, wake: Connection | None = None, most_s: float = _LOOK_S) -> None:
        """Wait until a process sends something or is out of time, and handle it; or for a moment. wake: see `_wait`."""
        self._wait([worker for worker in self._workers if not worker.is_idle], work, wake, most_s)

    def drop_calls(self) -> None:
        """End the processes that are busy, and start others in their place."""
        for worker in self._workers:
            if worker.chunk:
                self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _wait(
        self, workers: list[Worker], work: Work | None, wake: Connection | None = None, most_s: float = _LOOK_S
    ) -> None:
        """Wait until one of `workers` sends something or is out of time, and handle it; or for a moment.

        wake: what is sent there ends the wait, too.
        """
        pause = min([most_s, *(max(0.0, worker.deadline - time.monotonic()) for worker in workers)])
        connections = [worker.connection for worker in workers]
        spoke = readable(connections if wake is None else [*connections, wake], pause)
        if wake in spoke and wake is not None:
            wake.recv_bytes()
        for worker in workers:
            if worker.connection in spoke:
                self._listen(worker, work)
            elif time.monotonic() >= worker.deadline and not readable([worker.connection]):
                self._lost(worker, work, "timeout", self.late.format(self.config.timeout_s))

    def _listen(self, worker: Worker, work: Work | None) -> None:
        while readable([worker.connection]):
            try:
                what, value = worker.connection.recv()
            except (EOFError, OSError):
                return self._lost(worker, work, "error", self.ended.format(worker.exit_text()))
            if what == "failed":
                raise ConfigError(value)
            if what == "ready":
                worker.is_starting, worker.is_async, worker.deadline = False, value, math.inf
            elif work is not None:
                worker.answered(what, self.config.timeout_s)
                work.answered(what, value)

    def _lost(self, worker: Worker, work: Work | None, status: Failure, text: str) -> None:
        """A process died or hangs: start another one."""
        if worker.is_starting:
            hangs = f"importing it took more than {_IMPORT_LIMIT_S:g} s"
            why = hangs if status == "timeout" else self.importing.format(text)
            raise ConfigError(Problem(self._key, f"{self.name}: {why}"))
        self._replace(worker)
        if work is not None:
            work.lost(worker, status, text)


def readable(connections: Iterable[Connection], timeout_s: float = 0.0) -> set[Connection]:
    """Those that have something to read, or have ended, after waiting for the first of them.

    As multiprocessing.connection.wait, in a fifth of its time.
    """
    poll, by_number = select.poll(), {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(math.ceil(1000 * timeout_s))}


class Slow:
    """Tells when waiting has become long, and again each time that it has doubled."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._due_at = self._started + _SLOW_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def is_due(self) -> bool:
        if time.monotonic() < self._due_at:
            return False
        self._due_at = self._started + 2 * self.seconds
        return True
