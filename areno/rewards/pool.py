"""The driver's half of scoring: starts the reward processes, sends them samples, collects the rewards.

A user's reward function runs in processes of its own (areno.rewards.process is what runs there), so it can print, hang,
crash or leak without harm to the run. Every call has a hard time limit. If a call exceeds it or ends its process, only
that sample has no reward: the pool replaces the process and scores the others. Timeouts and errors are outcomes
of their own, not a reward of 0.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from areno import heartbeat
from areno.config.run import RewardConfig
from areno.engine.processes.child import dumps
from areno.errors import ArenoError, ConfigError, EngineError, Key, Problem, did_you_mean
from areno.files.paths import find_file
from areno.files.user_code import check_file, split_spec
from areno.rewards.process import DEFAULT_FUNCTION
from areno.rewards.worker import Worker
from areno.types import RewardOutcome, RewardRecord

logger = logging.getLogger("areno.rewards")

BUILT_IN = {"math": Path(__file__).with_name("math_reward.py")}

_KEY = "reward.fn"
IMPORT_LIMIT_S = 180.0  # an import may compile or download something, but a hang must end
_MAX_CHUNK = 32  # records sent at once to a plain function, which scores them one after another
_MAX_TOGETHER = 64  # calls of an async function that run at once in one process
_HOPELESS = 4  # give up after this many timeouts of each process without any answer: the others could take hours
_QUIET_S = 600.0  # and, once the function has ever answered, only after this long without an answer
_LOOK_S = 1.0
_SLOW_S = 10.0  # waiting for longer is told, then again each time that it has doubled
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
    name: of the function, for messages.
    """

    def __init__(self, config: RewardConfig, function: Callable[..., Any] | None = None):
        self.config = config
        self._function = function
        self.name = config.fn if function is None else getattr(function, "__name__", type(function).__name__)
        self._spec: str | bytes = ""
        self._workers: list[Worker] = []
        self._has_answered = False

    def start(self) -> None:
        """Start the processes and return at once. Raises ConfigError if the file is missing or does not parse.

        EngineError if the system does not let so many processes start.
        """
        self._spec = self._resolve()
        try:
            for _ in range(self.config.workers):
                self._workers.append(self._start_worker())
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            n_started = len(self._workers)
            self.close()
            text = "reward process {} of {} cannot be started: {}; lower {}"
            raise EngineError(text, n_started + 1, self.config.workers, error, Key("reward.workers")) from error

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
                self.name, type(error).__name__, error, Key(_KEY),
            ) from error  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until every process has imported the function. Raises ConfigError, of reward.fn, if one cannot."""
        slow = _Slow()
        while any(worker.is_starting for worker in self._workers):
            self._wait([worker for worker in self._workers if worker.is_starting], slow)
            if slow.is_due():
                logger.info("%s: importing %s takes %.0f s so far", _KEY, self.name, slow.seconds)

    def score(self, records: Sequence[RewardRecord]) -> list[RewardOutcome]:
        """The outcome of every record, in order. Raises ArenoError if none could be scored, or if every call hangs."""
        if not self._workers:
            raise EngineError("the reward pool is not running; call start() first")
        scoring, slow = _Scoring(records), _Slow()
        try:
            while scoring.n_open:
                for worker in self._workers:
                    if worker.is_idle:
                        worker.send(scoring.next_chunk(len(self._workers), worker.is_async), self.config.timeout_s)
                self._wait([worker for worker in self._workers if not worker.is_idle], slow, scoring)
                self._has_answered = self._has_answered or scoring.n_answers > 0
                if slow.is_due() and scoring.n_open:
                    logger.info(self._slow_text(scoring, slow.seconds))
                quiet_s = time.monotonic() - scoring.answered_at
                if scoring.n_unanswered >= _HOPELESS * len(self._workers) and (
                    quiet_s >= _QUIET_S or not self._has_answered
                ):
                    self._give_up(scoring, quiet_s)
        except BaseException:
            for worker in self._workers:
                if worker.chunk:
                    self._replace(worker)  # a late answer would be taken for one of the next call
            raise
        report_failures(records, scoring.outcomes)
        return scoring.outcomes

    def _slow_text(self, scoring: _Scoring, seconds: float) -> str:
        """How many samples wait, for how long, how long at most from now on, and what would shorten that."""
        config, n_together = self.config, max(_MAX_TOGETHER * worker.is_async or 1 for worker in self._workers)
        most_s = math.ceil(scoring.n_open / (n_together * len(self._workers))) * config.timeout_s
        return (
            f"rewards: {scoring.n_open} of {len(scoring.outcomes)} samples wait after {seconds:.0f} s "
            f"({scoring.n_timeouts} timeouts), for at most {_span(most_s)} more; raise reward.workers "
            f"({config.workers}) or lower reward.timeout_s ({config.timeout_s:g} s) to shorten this"
        )

    def _give_up(self, scoring: _Scoring, quiet_s: float) -> None:
        """Take every sample without an outcome for a timeout: nobody answers."""
        text = "not scored: the {} calls before it had no answer within {:g} s (reward.timeout_s)"
        text = text.format(scoring.n_unanswered, self.config.timeout_s)
        logger.warning("rewards: no answer for %s; giving up %d samples", _span(quiet_s), scoring.n_open)
        for worker in self._workers:
            if worker.chunk:
                self._replace(worker)
        for position, outcome in enumerate(scoring.outcomes):
            if outcome is None:
                scoring.settle(position, RewardOutcome(None, "timeout", text))

    def close(self) -> None:
        """End the processes and all processes that they started."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start_worker(self) -> Worker:
        return Worker((self._spec, _KEY, self.config.timeout_s), IMPORT_LIMIT_S)

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _wait(self, workers: list[Worker], slow: _Slow, scoring: _Scoring | None = None) -> None:
        """Wait until one of `workers` sends something or is out of time, and handle it; or until `slow` is due."""
        pause = max(0.0, min(slow.due_at, *(worker.deadline for worker in workers)) - time.monotonic())
        pause = min(pause, _LOOK_S)
        heartbeat.beat()  # however long a call may take, it has a limit, which is kept here
        spoke = set(wait([worker.connection for worker in workers], timeout=pause))
        for worker in workers:
            if worker.connection in spoke:
                try:
                    self._listen(worker, scoring)
                except (EOFError, OSError):
                    self._lost(worker, scoring, "error", f"ended its process ({worker.exit_text()})")
            elif time.monotonic() >= worker.deadline and not worker.connection.poll():
                text = f"no answer within {self.config.timeout_s:g} s (reward.timeout_s)"
                self._lost(worker, scoring, "timeout", text)

    def _listen(self, worker: Worker, scoring: _Scoring | None) -> None:
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

    def _lost(self, worker: Worker, scoring: _Scoring | None, status: Any, text: str) -> None:
        """Handle a process that died or hangs: blame one sample, queue the others again, start another process."""
        if worker.is_starting:
            hangs = status == "timeout"
            text = f"importing it took more than {IMPORT_LIMIT_S:g} s" if hangs else f"importing it {text}"
            raise ConfigError(Problem(_KEY, f"{self.name}: {text}"))
        chunk = list(worker.chunk)
        self._replace(worker)
        if scoring is None:
            return
        if worker.is_async and worker.sent > 1:
            scoring.alone.extend(chunk)  # one of these took the process down; this shows which
        elif chunk:
            scoring.settle(chunk[0], RewardOutcome(None, status, text))
            scoring.waiting.extendleft(reversed(chunk[1:]))


class _Scoring:
    """The samples of one call of `score`. n_open: without an outcome. alone: waiting, to be sent one at a time."""

    def __init__(self, records: Sequence[RewardRecord]):
        self.outcomes: list[Any] = [None] * len(records)
        self.n_open = len(records)
        self.n_timeouts = self.n_answers = 0
        self.n_unanswered = 0  # timeouts since the last answer, which came at answered_at
        self.answered_at = time.monotonic()
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
        if outcome.status == "timeout":
            self.n_timeouts += 1
            self.n_unanswered += 1
        else:
            self.n_answers += 1
            self.n_unanswered, self.answered_at = 0, time.monotonic()


class _Slow:
    """Tells when waiting has become long, and again each time that it has doubled."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.due_at = self._started + _SLOW_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def is_due(self) -> bool:
        if time.monotonic() < self.due_at:
            return False
        self.due_at = self._started + 2 * self.seconds
        return True


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def report_failures(records: Sequence[RewardRecord], outcomes: Sequence[RewardOutcome], key: str = _KEY) -> None:
    """Log the first few samples that could not be scored. Raises ArenoError, of the setting `key`, if that is all."""
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
        raise ArenoError(Problem(key, f"{text}; the first: {first.status}: {first.message}"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LOGGED_CHARS else text[: _LOGGED_CHARS - 3] + "..."
