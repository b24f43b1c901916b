"""Scoring samples with a user's function, in processes of its own: it may print, hang, crash or leak without harm to
the run.

Every call has a hard time limit. A call that exceeds it, or that ends its process, costs that one sample; the process
is replaced and the others go on. Timeouts and errors are outcomes of their own, not a reward of 0.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from areno.api.reward_worker import DEFAULT_FUNCTION, IMPORT_LIMIT_S
from areno.api.types import RewardOutcome, RewardRecord
from areno.api.user_code import check_file, split_spec
from areno.config.paths import find_file
from areno.config.run import RewardConfig
from areno.engine.process import dumps
from areno.errors import ArenoError, ConfigError, EngineError, Problem

logger = logging.getLogger("areno.rewards")

BUILT_IN = {"math": Path(__file__).with_name("math_reward.py")}

_KEY = "reward.fn"
_MAX_CHUNK = 32  # records sent at once to a plain function, which scores them one after another
_MAX_TOGETHER = 64  # calls of an async function that run at once in one process
_ASYNC_SPARE_S = 5.0  # an async function keeps time itself; this much later its process is taken to hang
_HOPELESS = 4  # this many timeouts of each process, and never an answer: to wait for all the others may take hours
_LOGGED_FAILURES = 3
_LOGGED_CHARS = 300


def resolve_reward(fn: str) -> str:
    """`reward.fn` as `absolute file:function`. Raises ConfigError if there is no such file or built-in."""
    if fn in BUILT_IN:
        return f"{BUILT_IN[fn]}:{DEFAULT_FUNCTION}"
    file, name = split_spec(fn, DEFAULT_FUNCTION)
    if not file.endswith(".py"):
        close = difflib.get_close_matches(fn, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}?" if close else f"built-in: {', '.join(BUILT_IN)}"
        raise ConfigError([Problem(_KEY, f"is {fn!r}; expected file.py, file.py:function or a built-in; {hint}")])
    path = find_file(file, _KEY)
    check_file(path, file, _KEY)
    return f"{path}:{name}"


class RewardPool:
    """`workers` processes that call the reward function. Start it early: the import runs beside other work.

    function: of a script, called in place of config.fn; it travels to the processes by value.
    """

    def __init__(self, config: RewardConfig, function: Callable[..., Any] | None = None):
        self.config = config
        self._function = function
        self._name = config.fn if function is None else getattr(function, "__name__", type(function).__name__)
        self._spec: str | bytes = ""
        self._workers: list[_Worker] = []
        self._has_answered = False

    def start(self) -> None:
        """Start the processes and return at once. Raises ConfigError if the file is missing or is no Python."""
        self._spec = self._resolve()
        self._workers = [self._start_worker() for _ in range(self.config.workers)]

    def _resolve(self) -> str | bytes:
        if self._function is None:
            if self.config.fn is None:
                raise ConfigError([Problem(_KEY, "is null, and no function was given; set it, or pass reward_fn=")])
            return resolve_reward(self.config.fn)
        if not callable(self._function):
            raise ConfigError(f"reward_fn is {self._function!r}; expected a function of one record")
        try:
            return dumps(self._function)
        except Exception as error:  # objects decide themselves how they refuse
            raise ConfigError(
                f"reward_fn {self._name} cannot be sent to the reward processes ({type(error).__name__}: {error}); "
                f"make what it holds inside of it, or put it into a file and set {_KEY}"
            ) from error

    def wait_ready(self) -> None:
        """Wait until the function is imported everywhere. Raises ConfigError, naming reward.fn, if it cannot be."""
        while any(worker.is_starting for worker in self._workers):
            self._wait([worker for worker in self._workers if worker.is_starting])

    def score(self, records: Sequence[RewardRecord]) -> list[RewardOutcome]:
        """The outcome of every record, in order.

        Raises ArenoError if there are records and none could be scored, or if the function does nothing but hang.
        """
        if not self._workers:
            raise EngineError("the reward pool is not running; call start() first")
        scoring = _Scoring(records)
        try:
            while scoring.n_open:
                for worker in self._workers:
                    if worker.is_idle:
                        worker.send(scoring.next_chunk(len(self._workers), worker.is_async), self.config.timeout_s)
                self._wait([worker for worker in self._workers if not worker.is_idle], scoring)
                self._has_answered = self._has_answered or scoring.n_answers > 0
                if not self._has_answered and scoring.n_timeouts >= _HOPELESS * len(self._workers):
                    limit = f"{self.config.timeout_s:g} s (reward.timeout_s)"
                    raise ArenoError(f"{_KEY}: no answer within {limit} for any of {scoring.n_timeouts} samples")
        except BaseException:
            for worker in self._workers:
                if worker.chunk:
                    self._replace(worker)  # what it still answers belongs to nobody
            raise
        _report(records, scoring.outcomes)
        return scoring.outcomes

    def pids(self) -> list[int]:
        """The processes that are running."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the processes and whatever they started."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_worker(self) -> _Worker:
        return _Worker((self._spec, _KEY, self.config.timeout_s))

    def _replace(self, worker: _Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _wait(self, workers: list[_Worker], scoring: _Scoring | None = None) -> None:
        """Until one of `workers` says something or is out of time, then act on it."""
        pause = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
        spoke = set(wait([worker.connection for worker in workers], timeout=min(pause, 3600.0)))
        for worker in workers:
            if worker.connection in spoke:
                try:
                    self._listen(worker, scoring)
                except (EOFError, OSError):
                    self._lost(worker, scoring, "error", f"ended its process ({worker.exit_text()})")
            elif time.monotonic() >= worker.deadline and not worker.connection.poll():
                limit = f"{self.config.timeout_s:g} s (reward.timeout_s)"
                self._lost(worker, scoring, "timeout", f"no answer within {limit}")

    def _listen(self, worker: _Worker, scoring: _Scoring | None) -> None:
        while worker.connection.poll():
            message = worker.connection.recv()
            if message[0] == "failed":
                raise ConfigError(str(message[1]))
            if message[0] == "ready":
                worker.ready(is_async=message[1])
            elif scoring is not None:
                position, status, value, text = message
                worker.answered(position, self.config.timeout_s)
                scoring.settle(position, RewardOutcome(value, status, text))

    def _lost(self, worker: _Worker, scoring: _Scoring | None, status: Any, text: str) -> None:
        """A process that died or hangs: find the sample to blame, give the others back, start another process."""
        if worker.is_starting:
            hangs = status == "timeout"
            text = f"importing it took more than {IMPORT_LIMIT_S:g} s" if hangs else f"importing it {text}"
            raise ConfigError([Problem(_KEY, f"{self._name}: {text}")])
        chunk = list(worker.chunk)
        self._replace(worker)
        if scoring is None:
            return
        if worker.is_async and worker.sent > 1:
            scoring.retry_alone(chunk)
        elif chunk:
            scoring.settle(chunk[0], RewardOutcome(None, status, text))
            scoring.give_back(chunk[1:])


class _Worker:
    """The driver's view of one process. It is starting, idle (no chunk), or busy with `chunk` until `deadline`."""

    def __init__(self, first_message: tuple[str | bytes, str, float]):
        ours, theirs = socket.socketpair()
        # Not multiprocessing: its children import the driver's main module again, with all that this imports.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from areno.api.reward_worker import main; "
            f"main({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that all it starts can be ended with it, and Ctrl-C does not reach it
            )
        self.connection = Connection(ours.detach())
        self.chunk: deque[int] = deque()
        self.sent = 0
        self.is_async = False
        self.is_starting = True
        self.deadline = time.monotonic() + IMPORT_LIMIT_S
        self.connection.send(first_message)

    @property
    def is_idle(self) -> bool:
        return not self.is_starting and not self.chunk

    def ready(self, is_async: bool) -> None:
        self.is_starting, self.is_async, self.deadline = False, is_async, math.inf

    def send(self, chunk: list[tuple[int, bytes]], timeout_s: float) -> None:
        if not chunk:
            return
        self.chunk = deque(position for position, _ in chunk)
        self.sent = len(chunk)
        with contextlib.suppress(OSError):  # it is dead, which reading from it will show
            self.connection.send(chunk)
        self.deadline = time.monotonic() + timeout_s + (_ASYNC_SPARE_S if self.is_async else 0.0)

    def answered(self, position: int, timeout_s: float) -> None:
        self.chunk.remove(position)
        if not self.chunk:
            self.deadline = math.inf
        elif not self.is_async:  # the next call has just begun
            self.deadline = time.monotonic() + timeout_s

    def exit_text(self) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class _Scoring:
    """The samples of one call of `score`: which wait, which are done."""

    def __init__(self, records: Sequence[RewardRecord]):
        self.outcomes: list[Any] = [None] * len(records)
        self.n_open = len(records)
        self.n_timeouts = self.n_answers = 0
        self._payloads: list[bytes] = []
        self._waiting: deque[int] = deque()
        self._alone: deque[int] = deque()
        for position, record in enumerate(records):
            try:
                self._payloads.append(pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL))
                self._waiting.append(position)
            except Exception as error:  # objects decide themselves how they refuse
                self._payloads.append(b"")
                text = f"the record cannot be sent to the reward process: {type(error).__name__}: {error}"
                self.settle(position, RewardOutcome(None, "error", text))

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        """Work for one idle process: large pieces first, single records at the end, so that all finish together."""
        if self._alone:
            position = self._alone.popleft()
            return [(position, self._payloads[position])]
        n_waiting = len(self._waiting)
        if is_async:
            size = min(_MAX_TOGETHER, math.ceil(n_waiting / n_workers))
        else:
            size = min(_MAX_CHUNK, math.ceil(n_waiting / (4 * n_workers)))
        positions = [self._waiting.popleft() for _ in range(size)]
        return [(position, self._payloads[position]) for position in positions]

    def settle(self, position: int, outcome: RewardOutcome) -> None:
        self.outcomes[position] = outcome
        self.n_open -= 1
        if outcome.status == "timeout":
            self.n_timeouts += 1
        else:
            self.n_answers += 1

    def give_back(self, positions: list[int]) -> None:
        self._waiting.extendleft(reversed(positions))

    def retry_alone(self, positions: list[int]) -> None:
        """One of these, run together, took the process down; alone it will be known which."""
        self._alone.extend(positions)


def _report(records: Sequence[RewardRecord], outcomes: list[RewardOutcome]) -> None:
    """Log the first few samples that could not be scored. Raises ArenoError if that is all of them."""
    failed = [position for position, outcome in enumerate(outcomes) if outcome.status != "ok"]
    if not failed:
        return
    for position in failed[:_LOGGED_FAILURES]:
        outcome, record = outcomes[position], records[position]
        logger.warning(
            "reward %s: %s; sample: prompt=%s completion=%s solutions=%s",
            outcome.status, outcome.message, _short(record.prompt), _short(record.completion), _short(record.solutions),
        )  # fmt: skip
    if len(failed) > _LOGGED_FAILURES:
        logger.warning("reward: %d samples of %d could not be scored", len(failed), len(outcomes))
    if len(failed) == len(outcomes):
        first = outcomes[failed[0]]
        raise ArenoError(
            f"{_KEY}: no reward could be computed for any of the {len(outcomes)} samples; "
            f"the first: {first.status}: {first.message}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LOGGED_CHARS else text[: _LOGGED_CHARS - 3] + "..."
