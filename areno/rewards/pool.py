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
from collections.abc import Sequence
from typing import Any

from areno.config.rollout.reward import RewardConfig
from areno.errors import ArenoError, Problem
from areno.rewards.functions import KEY, Given, reward_functions, shown_names
from areno.rewards.worker import Worker
from areno.rewards.worker_pool import Failure, Slow, WorkerPool
from areno.types import RewardOutcome, RewardRecord

logger = logging.getLogger("areno.rewards")

_MAX_CHUNK = 32  # records sent at once to a plain function, which scores them one after another
_MAX_TOGETHER = 64  # calls of an async function that run at once in one process
_HOPELESS = 4  # give up after this many timeouts of each process without any answer: the others could take hours
_QUIET_S = 600.0  # and, once the function has ever answered, only after this long without an answer
_LOGGED_FAILURES = 3
_LOGGED_CHARS = 300


class RewardPool(WorkerPool[RewardConfig]):
    """The processes that call the reward functions.

    function: a script's own reward function, or several, in place of config.fn. They are sent to the processes by
    value. tracebacks: whether the message of an error has all lines of its traceback.
    """

    noun, serves = "reward", "areno.rewards.process"
    ended, late = "ended its process ({})", "no answer within {:g} s (reward.timeout_s)"
    importing = "importing it {}"

    def __init__(self, config: RewardConfig, function: Given | None = None, tracebacks: bool = False):
        super().__init__(config, shown_names(config, function))
        self._given, self._tracebacks = function, tracebacks
        self._has_answered = False

    def _opening(self) -> tuple[Any, ...]:
        return reward_functions(self.config, self._given), KEY, self.config.timeout_s, self._tracebacks

    def score(self, records: Sequence[RewardRecord]) -> list[RewardOutcome]:
        """The outcome of every record, in order; failures are logged. Raises ArenoError if none could be scored."""
        outcomes = self.outcomes(records)
        report_failures(records, outcomes)
        return outcomes

    def outcomes(self, records: Sequence[RewardRecord]) -> list[RewardOutcome]:
        """The outcome of every record, in order."""
        scoring, slow = _Scoring(records), Slow()

        def look() -> None:
            self._has_answered = self._has_answered or scoring.n_answers > 0
            if slow.is_due() and scoring.n_open:
                logger.info(self._slow_text(scoring, slow.seconds))
            quiet_s = time.monotonic() - scoring.answered_at
            if scoring.n_unanswered >= _HOPELESS * len(self._workers) and (
                quiet_s >= _QUIET_S or not self._has_answered
            ):
                self._give_up(scoring, quiet_s)

        self._do(scoring, look)
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
        self._replace_busy()
        for position, outcome in enumerate(scoring.outcomes):
            if outcome is None:
                scoring.settle(position, RewardOutcome(None, "timeout", text))


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

    def answered(self, position: int, answer: tuple[Any, ...]) -> None:
        status, value, text, parts = answer
        self.settle(position, RewardOutcome(value, status, text, parts))

    def lost(self, worker: Worker, status: Failure, text: str) -> None:
        """Blame one record, and queue the others again."""
        if worker.is_async and worker.sent > 1:
            self.alone.extend(worker.chunk)  # one of these took the process down; this shows which
        elif worker.chunk:
            first, *others = worker.chunk
            self.settle(first, RewardOutcome(None, status, text))
            self.waiting.extendleft(reversed(others))

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


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def report_failures(records: Sequence[RewardRecord], outcomes: Sequence[RewardOutcome], key: str = KEY) -> None:
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
