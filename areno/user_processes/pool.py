"""The base class for pools of processes that run user code."""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from areno import heartbeat, trace
from areno.config.agent import AgentConfig
from areno.config.reward import RewardConfig
from areno.errors import ConfigError, EngineError, Key, Problem
from areno.user_processes.worker import OutputLogger, Worker

_CGROUP = Path("/sys/fs/cgroup")
MIN_WORKERS, MAX_WORKERS = 2, 64
"""The limits of the default number of processes.

With two processes, a process that hangs does not block all calls. More processes take more memory and time to start.
"""


def default_workers(n_devices: int = 0, cgroup: Path = _CGROUP) -> int:
    """Return the usable CPU cores minus 1 minus `n_devices`, but at least MIN_WORKERS and at most MAX_WORKERS.

    `cgroup` is the folder of the Linux control group, whose files hold the container's CPU limit.
    """
    return min(MAX_WORKERS, max(MIN_WORKERS, usable_cores(cgroup) - 1 - n_devices))


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the number of CPU cores that this process may run on. A container's limit on CPU time lowers it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, _cpu_quota(cgroup))))


def _cpu_quota(cgroup: Path) -> float:
    """Return the container's limit on CPU time as a number of cores, or infinity."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroup versions 2 and 1
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


class CallHandler(Protocol):
    """Receives the answers to calls of user code by index, and the failures of the processes that ran the calls."""

    def record_answer(self, position: int, answer: tuple[Any, ...], span: tuple[int, int]) -> None:
        """Record the answer to the call `position`. `span` is (start, end), as times of areno.trace."""
        ...

    def handle_lost_worker(self, worker: Worker, status: Failure, text: str) -> None:
        """Handle the unanswered calls `worker.chunk` of a process that died ("error") or was too slow ("timeout")."""
        ...


class CallQueue(CallHandler, Protocol):
    """The calls of user code that the driver requests. A pool distributes them over its processes."""

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        """Return (index, pickled arguments) of the calls for an idle process of `n_workers`. Empty if none is left."""
        ...


class WorkerPool(Generic[Config]):
    """Base class for a pool of processes that call user code. Use it in a `with` block.

    Start the pool early, so that the processes import the user code while the driver does other work. `name` names the
    user's functions in logs and errors, such as "file.py:function". A process that ended is replaced in `workers`.
    """

    section: ClassVar[str]  # "reward" or "agent"
    module: ClassVar[str]  # whose function `serve` the processes run
    ended_text: ClassVar[str]  # for a process that died; {}: exit code or signal
    late_text: ClassVar[str]  # for one that did not answer in time; {}: the limit in seconds
    import_text: ClassVar[str]  # for one that died while importing the user code; {}: the reason

    def __init__(self, config: Config, name: str, n_workers: int):
        self.config, self.name, self.n_workers = config, name, n_workers
        self._key = f"{self.section}.fn"
        self.output = OutputLogger(self.section)
        self._logger = logging.getLogger(f"areno.{self.section}s")
        self._first_message: tuple[Any, ...] = ()
        self.workers: list[Worker] = []

    def start(self) -> None:
        """Start the processes, without waiting until they have imported the user code.

        Raises ConfigError if the user code is missing or cannot be sent to them, EngineError if the system refuses to
        start so many processes.
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
        """Wait until every process has imported the user code. Raises ConfigError if one cannot."""
        slow = SlowCallTimer()
        while starting := [worker for worker in self.workers if worker.is_starting]:
            self._wait_for_workers(starting, None)
            heartbeat.beat()
            if slow.is_due():
                self._logger.info("%s: importing %s takes %.0f s so far", self._key, self.name, slow.elapsed_seconds)

    def close(self) -> None:
        for worker in self.workers:
            worker.request_stop()
        for worker in self.workers:
            worker.shut_down()
        self.workers = []

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _build_first_message(self) -> tuple[Any, ...]:
        """Return the user code and its options, for a new process. Raises ConfigError if it cannot be found or sent."""
        raise NotImplementedError

    def _start_worker(self) -> Worker:
        return Worker(self._first_message, IMPORT_LIMIT_S, self.module, self.output)

    def send_calls(self, work: CallQueue) -> None:
        """Send a chunk of calls to each idle process while there are calls left."""
        for worker in self.workers:
            if worker.is_idle:
                worker.send_calls(work.next_chunk(len(self.workers), worker.is_async), self.config.timeout_s)

    def wait_for_answers(self, work: CallHandler, wake: Connection | None = None, max_s: float = _POLL_S) -> None:
        """Wait until a busy process answers, dies or exceeds its time limit, and report this to `work`.

        A message on the connection `wake` also ends the wait. It is read and ignored.
        """
        self._wait_for_workers([worker for worker in self.workers if not worker.is_idle], work, wake, max_s)

    def restart_busy_workers(self) -> None:
        """Kill the busy processes, so that their calls have no answer, and start new processes in their place."""
        for worker in self.workers:
            if worker.chunk:
                self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.shut_down()
        self.workers[self.workers.index(worker)] = self._start_worker()

    def _wait_for_workers(
        self, workers: list[Worker], work: CallHandler | None, wake: Connection | None = None, max_s: float = _POLL_S
    ) -> None:
        """Do the work of `wait_for_answers` for the given processes. `work` is None while they import the user code."""
        timeout_s = min([max_s, *(max(0.0, worker.deadline - time.monotonic()) for worker in workers)])
        connections = [worker.connection for worker in workers]
        ready = readable_connections(connections if wake is None else [*connections, wake], timeout_s)
        if wake in ready and wake is not None:
            wake.recv_bytes()
        for worker in workers:
            if worker.messages or worker.connection in ready:
                self._receive(worker, work)
            elif time.monotonic() >= worker.deadline and not readable_connections([worker.connection]):
                self._on_worker_lost(worker, work, "timeout", self.late_text.format(self.config.timeout_s))

    def _receive(self, worker: Worker, work: CallHandler | None) -> None:
        """Pass the answers of a process to `work`. Replace the process if it has died.

        Raises ConfigError if it cannot import the user code, or dies while importing it.
        """
        while worker.messages or readable_connections([worker.connection]):
            try:
                if not worker.messages:
                    worker.read_messages()
                    continue
                kind_or_position, value = pickle.loads(worker.messages.popleft())
            except (EOFError, OSError, pickle.UnpicklingError):  # user code may write to the connection, too
                return self._on_worker_lost(worker, work, "error", self.ended_text.format(worker.exit_text()))
            if kind_or_position == "failed":
                raise ConfigError(value)
            if kind_or_position == "ready":
                worker.is_starting, worker.is_async, worker.deadline = False, value, math.inf
            elif kind_or_position == "left":
                worker.has_left = True
            elif work is not None:
                span = worker.remove_answered_call(kind_or_position, self.config.timeout_s)
                self._trace_call(worker, kind_or_position, span)
                work.record_answer(kind_or_position, value, span)

    def _trace_call(self, worker: Worker, position: int, span: tuple[int, int]) -> None:
        """Record a call in the trace of the run. Each concurrent call of an async function gets its own lane."""
        if trace.active:
            number, name = self.workers.index(worker), self.section
            lane = f"{name} calls#{number}.{position}" if worker.is_async else f"{name}/process {number}"
            trace.add(lane, self.section, *span, sample=position, process=number)

    def _on_worker_lost(self, worker: Worker, work: CallHandler | None, status: Failure, text: str) -> None:
        """Replace a process that died or hangs. Raises ConfigError if it was still importing the user code."""
        if worker.is_starting:
            hangs = f"importing it took more than {IMPORT_LIMIT_S:g} s"
            why = hangs if status == "timeout" else self.import_text.format(text)
            raise ConfigError(Problem(self._key, f"{self.name}: {why}"))
        for position in worker.running_calls():
            self._trace_call(worker, position, worker.span_until_now(position))
        self._replace(worker)
        if work is not None:
            work.handle_lost_worker(worker, status, text)


def readable_connections(connections: Iterable[Connection], timeout_s: float = 0.0) -> set[Connection]:
    """Return the connections that have data or are closed.

    This does the same as multiprocessing.connection.wait in a fifth of the time.
    """
    poll, by_number = select.poll(), {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(math.ceil(1000 * timeout_s))}


class SlowCallTimer:
    """Decides when to log a long wait: after SLOW_S seconds, then whenever it has doubled since the last log."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._due_at = self._started + SLOW_S

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def is_due(self) -> bool:
        if time.monotonic() < self._due_at:
            return False
        self._due_at = self._started + 2 * self.elapsed_seconds
        return True
