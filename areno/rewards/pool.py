"""The driver's half of scoring: starts the reward processes, sends them samples, collects the rewards.

A user's reward function runs in processes of its own (areno.rewards.process is what runs there), so it can print, hang,
crash or leak without harm to the run. Every call has a hard time limit. If a call exceeds it or ends its process, only
that sample has no reward: the pool replaces the process and scores the others. Timeouts and errors are outcomes
of their own, not a reward of 0.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from areno.config.run import RewardConfig
from areno.engine.processes.child import dumps
from areno.errors import ArenoError, ConfigError, EngineError, Key, Problem, did_you_mean
from areno.files.paths import find_file
from areno.files.user_code import check_file, split_spec
from areno.rewards.process import DEFAULT_FUNCTION, IMPORT_LIMIT_S
from areno.types import RewardOutcome, RewardRecord

logger = logging.getLogger("areno.rewards")

BUILT_IN = {"math": Path(__file__).with_name("math_reward.py")}

_KEY = "reward.fn"
_MAX_CHUNK = 32  # records sent at once to a plain function, which scores them one after another
_MAX_TOGETHER = 64  # calls of an async function that run at once in one process
_ASYNC_SPARE_S = 5.0  # an async function keeps time itself; this much later its process is taken to hang
_HOPELESS = 4  # give up after this many timeouts of each process without any answer: the others could take hours
_LOGGED_FAILURES = 3
_LOGGED_CHARS = 300


def resolve_reward(fn: str) -> str:
    """`reward.fn` as `absolute file:function`. Raises ConfigError if there is no such file or built-in."""
    if fn in BUILT_IN:
        return f"{BUILT_IN[fn]}:{DEFAULT_FUNCTION}"
    file, name = split_spec(fn, DEFAULT_FUNCTION)
    if not file.endswith(".py"):
        hint = did_you_mean(fn, BUILT_IN, otherwise=f"; built-in: {', '.join(BUILT_IN)}")
        raise ConfigError(Problem(_KEY, f"is {fn!r}; expected file.py, file.py:function or a built-in{hint}"))
    path = find_file(file, _KEY)
    check_file(path, file, _KEY)
    return f"{path}:{name}"


class RewardPool:
    """`config.workers` processes that call the reward function. Start it early: they import it beside other work.

    function: a script's own reward function, in place of config.fn. It is sent to the processes by value.
    """

    def __init__(self, config: RewardConfig, function: Callable[..., Any] | None = None):
        self.config = config
        self._function = function
        self._name = config.fn if function is None else getattr(function, "__name__", type(function).__name__)
        self._spec: str | bytes = ""
        self._workers: list[_Worker] = []
        self._has_answered = False

    def start(self) -> None:
        """Start the processes and return at once. Raises ConfigError if the file is missing or does not parse."""
        self._spec = self._resolve()
        self._workers = [self._start_worker() for _ in range(self.config.workers)]

    def _resolve(self) -> str | bytes:
        if self._function is None:
            if self.config.fn is None:
                raise ConfigError(Problem(_KEY, "is null, and no function was given; set it, or pass reward_fn="))
            return resolve_reward(self.config.fn)
        if not callable(self._function):
            raise ConfigError(f"reward_fn is {self._function!r}; expected a function of one record")
        try:
            return dumps(self._function)
        except Exception as error:  # an object may raise anything when it is pickled
            raise ConfigError(
                "reward_fn {} cannot be sent to the reward processes ({}: {}); make what it holds inside of it, "
                "or put it into a file and set {}",
                self._name, type(error).__name__, error, Key(_KEY),
            ) from error  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until every process has imported the function. Raises ConfigError, of reward.fn, if one cannot."""
        while any(worker.is_starting for worker in self._workers):
            self._wait([worker for worker in self._workers if worker.is_starting])

    def score(self, records: Sequence[RewardRecord]) -> list[RewardOutcome]:
        """The outcome of every record, in order. Raises ArenoError if none could be scored, or if every call hangs."""
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
                    text = "no answer within {:g} s ({}) for any of {} samples"
                    values = self.config.timeout_s, Key("reward.timeout_s"), scoring.n_timeouts
                    raise ArenoError(Problem(_KEY, text, *values))
        except BaseException:
            for worker in self._workers:
                if worker.chunk:
                    self._replace(worker)  # a late answer would be taken for one of the next call
            raise
        _report(records, scoring.outcomes)
        return scoring.outcomes

    def close(self) -> None:
        """End the processes and all processes that they started."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start_worker(self) -> _Worker:
        return _Worker((self._spec, _KEY, self.config.timeout_s))

    def _replace(self, worker: _Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _wait(self, workers: list[_Worker], scoring: _Scoring | None = None) -> None:
        """Wait until one of `workers` sends something or is out of time, and handle it."""
        pause = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
        spoke = set(wait([worker.connection for worker in workers], timeout=min(pause, 3600.0)))
        for worker in workers:
            if worker.connection in spoke:
                try:
                    self._listen(worker, scoring)
                except (EOFError, OSError):
                    self._lost(worker, scoring, "error", f"ended its process ({worker.exit_text()})")
            elif time.monotonic() >= worker.deadline and not worker.connection.poll():
                text = f"no answer within {self.config.timeout_s:g} s (reward.timeout_s)"
                self._lost(worker, scoring, "timeout", text)

    def _listen(self, worker: _Worker, scoring: _Scoring | None) -> None:
        while worker.connection.poll():
            message = worker.connection.recv()
            if message[0] == "failed":
                raise ConfigError(message[1])
            if message[0] == "ready":
                worker.is_starting, worker.is_async, worker.deadline = False, message[1], math.inf
            elif scoring is not None:
                position, status, value, text = message
                worker.answered(position, self.config.timeout_s)
                scoring.settle(position, RewardOutcome(value, status, text))

    def _lost(self, worker: _Worker, scoring: _Scoring | None, status: Any, text: str) -> None:
        """Handle a process that died or hangs: blame one sample, queue the others again, start another process."""
        if worker.is_starting:
            hangs = status == "timeout"
            text = f"importing it took more than {IMPORT_LIMIT_S:g} s" if hangs else f"importing it {text}"
            raise ConfigError(Problem(_KEY, f"{self._name}: {text}"))
        chunk = list(worker.chunk)
        self._replace(worker)
        if scoring is None:
            return
        if worker.is_async and worker.sent > 1:
            scoring.alone.extend(chunk)  # one of these took the process down; this shows which
        elif chunk:
            scoring.settle(chunk[0], RewardOutcome(None, status, text))
            scoring.waiting.extendleft(reversed(chunk[1:]))


class _Worker:
    """One process as the driver sees it: starting, idle (no chunk), or busy with `chunk` until `deadline`."""

    def __init__(self, first_message: tuple[str | bytes, str, float]):
        self.connection, theirs = Pipe()
        # Not multiprocessing: its children would import the driver's main module and all that this imports.
        fd = theirs.fileno()
        start = f"from areno.rewards.process import main; main({fd}, {os.getpid()})"
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
        with theirs:
            # In a session of its own: Ctrl-C does not reach it, and its children end with it.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True)
        self.chunk: deque[int] = deque()
        self.sent = 0
        self.is_async = False
        self.is_starting = True
        self.deadline = time.monotonic() + IMPORT_LIMIT_S
        self.connection.send(first_message)

    @property
    def is_idle(self) -> bool:
        return not self.is_starting and not self.chunk

    def send(self, chunk: list[tuple[int, bytes]], timeout_s: float) -> None:
        if not chunk:
            return
        self.chunk = deque(position for position, _ in chunk)
        self.sent = len(chunk)
        with contextlib.suppress(OSError):  # the process is dead; reading from it will show that
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
    """The samples of one call of `score`. n_open: without an outcome. alone: waiting, to be sent one at a time."""

    def __init__(self, records: Sequence[RewardRecord]):
        self.outcomes: list[Any] = [None] * len(records)
        self.n_open = len(records)
        self.n_timeouts = self.n_answers = 0
        self._payloads: dict[int, bytes] = {}
        self.alone: deque[int] = deque()
        for position, record in enumerate(records):
            try:
                self._payloads[position] = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # an object may raise anything when it is pickled
                text = f"the record cannot be sent to the reward process: {type(error).__name__}: {error}"
                self.settle(position, RewardOutcome(None, "error", text))
        self.waiting = deque(self._payloads)

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        """Records for one idle process: large chunks first and single ones last, so that all processes end together."""
        if self.alone:
            position = self.alone.popleft()
            return [(position, self._payloads[position])]
        largest, n_shares = (_MAX_TOGETHER, n_workers) if is_async else (_MAX_CHUNK, 4 * n_workers)
        size = min(largest, math.ceil(len(self.waiting) / n_shares))
        positions = [self.waiting.popleft() for _ in range(size)]
        return [(position, self._payloads[position]) for position in positions]

    def settle(self, position: int, outcome: RewardOutcome) -> None:
        self.outcomes[position] = outcome
        self.n_open -= 1
        self.n_timeouts += outcome.status == "timeout"
        self.n_answers += outcome.status != "timeout"


def _report(records: Sequence[RewardRecord], outcomes: list[RewardOutcome]) -> None:
    """Log the first few samples that could not be scored. Raises ArenoError if that is all of them."""
    failed = [(outcome, record) for outcome, record in zip(outcomes, records, strict=True) if outcome.status != "ok"]
    for outcome, record in failed[:_LOGGED_FAILURES]:
        sample = (_short(value) for value in (record.prompt, record.completion, record.solutions))
        text = "reward %s: %s; sample: prompt=%s completion=%s solutions=%s"
        logger.warning(text, outcome.status, outcome.message, *sample)
    if len(failed) > _LOGGED_FAILURES:
        logger.warning("reward: %d samples of %d could not be scored", len(failed), len(outcomes))
    if failed and len(failed) == len(outcomes):
        first, _ = failed[0]
        text = f"no reward could be computed for any of the {len(outcomes)} samples"
        raise ArenoError(Problem(_KEY, f"{text}; the first: {first.status}: {first.message}"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LOGGED_CHARS else text[: _LOGGED_CHARS - 3] + "..."
