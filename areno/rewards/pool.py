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
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Pipe
from typing import Any

from areno import heartbeat
from areno.config.rollout import RewardConfig
from areno.errors import ArenoError, EngineError, Problem
from areno.rewards.functions import KEY, Given, reward_functions, shown_names
from areno.rewards.records import Record
from areno.types import RewardOutcome, RewardRecord
from areno.user_processes.pool import Failure, Slow, WorkerPool, default_workers
from areno.user_processes.worker import Worker

logger = logging.getLogger("areno.rewards")

_MAX_CHUNK = 32  # records sent at once to a plain function, which scores them one after another
_MAX_TOGETHER = 64  # calls of an async function that run at once in one process
_HOPELESS = 4  # give up after this many timeouts of each process without any answer: the others could take hours
_LOOK_S = 0.5
_BREATH_S = 0.001  # between turns: a turn for each answer would take the driver more time than all else
_QUIET_S = 600.0  # and, once the function has ever answered, only after this long without an answer
_LOGGED_FAILURES = 3
_LOGGED_CHARS = 300


class RewardPool(WorkerPool[RewardConfig]):
    """The processes that call the reward functions.

    function: a script's own reward function, or several, in place of config.fn. They are sent to the processes by
    value. tracebacks: whether the message of an error has all lines of its traceback. n_devices: whose workers need a
    core each, too.
    """

    noun, serves = "reward", "areno.rewards.process"
    ended, late = "ended its process ({})", "no answer within {:g} s (reward.timeout_s)"
    importing = "importing it {}"

    def __init__(
        self, config: RewardConfig, function: Given | None = None, tracebacks: bool = False, n_devices: int = 0
    ):
        super().__init__(config, shown_names(config, function), config.workers or default_workers(n_devices))
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
        with self.scoring() as scoring:
            scoring.add(dict(enumerate(records)))
            return [scoring.outcomes()[position] for position in range(len(records))]

    def scoring(self) -> Scoring:
        """For samples that come one after another. One at a time may be open."""
        if not self._workers:
            raise EngineError("the reward processes are not running; call start() first")
        self.output.begin_step()
        return Scoring(self)

    def look(self, calls: _Calls) -> None:
        """Give up where nobody answers any more. Called by a `Scoring` now and then."""
        self._has_answered = self._has_answered or calls.n_answers > 0
        quiet_s = time.monotonic() - calls.answered_at
        if calls.n_unanswered >= _HOPELESS * len(self._workers) and (quiet_s >= _QUIET_S or not self._has_answered):
            self._give_up(calls, quiet_s)

    def slow_text(self, calls: _Calls, seconds: float) -> str:
        """How many samples wait, for how long, how long at most from now on, and what would shorten that."""
        config, n_together = self.config, max(_MAX_TOGETHER * worker.is_async or 1 for worker in self._workers)
        most_s = math.ceil(calls.n_open / (n_together * len(self._workers))) * config.timeout_s
        return (
            f"rewards: {calls.n_open} of {calls.n_open + len(calls.outcomes)} samples wait after {seconds:.0f} s "
            f"({calls.n_timeouts} timeouts), for at most {_span(most_s)} more; raise reward.workers "
            f"({self.n_workers}) or lower reward.timeout_s ({config.timeout_s:g} s) to shorten this"
        )

    def _give_up(self, calls: _Calls, quiet_s: float) -> None:
        """Take every sample without an outcome for a timeout: nobody answers."""
        text = "not scored: the {} calls before it had no answer within {:g} s (reward.timeout_s)"
        text = text.format(calls.n_unanswered, self.config.timeout_s)
        logger.warning("rewards: no answer for %s; giving up %d samples", _span(quiet_s), calls.n_open)
        self.drop_calls()
        calls.give_up(RewardOutcome(None, "timeout", text))


class Scoring(AbstractContextManager["Scoring"]):
    """Scores samples as they come, in a thread, while whoever adds them does other work.

    To leave the block without having asked for the outcomes drops what is not scored.
    """

    def __init__(self, pool: RewardPool):
        self._pool, self._calls = pool, _Calls()
        self._added: deque[tuple[int, Record]] = deque()
        self._turns = 0  # of the thread
        self._is_last = self._is_dropped = False
        self._error: BaseException | None = None
        self._wake, self._woken = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="areno-rewards")
        self._thread.start()

    def add(self, records: Mapping[int, Record]) -> None:
        """Score these, each under a number of its own. Raises what has gone wrong in the thread."""
        self._raise_error()
        self._added.extend(records.items())
        self._nudge()

    def outcomes(self) -> dict[int, RewardOutcome]:
        """The outcome of each sample, when all of them are there. Nothing is added after that."""
        self._is_last = True
        self._nudge()
        slow, turns = Slow(), -1
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            if turns != self._turns:  # it gets on: however long a call may take, it has a limit, which is kept there
                turns = self._turns
                heartbeat.beat()
            if slow.is_due() and self._calls.n_open:
                logger.info(self._pool.slow_text(self._calls, slow.seconds))
        self._raise_error()
        return self._calls.outcomes

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            self._woken.send_bytes(b".")

    def __exit__(self, *exc: object) -> None:
        self._is_dropped = True
        self._nudge()
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        pool, calls = self._pool, self._calls
        try:
            while not (self._is_dropped or (self._is_last and not self._added and not calls.n_open)):
                # A few at a time: the first ones are being scored while the others are made ready to be sent.
                for _ in range(min(_MAX_CHUNK, len(self._added))):
                    calls.add(*self._added.popleft())
                pool.deal(calls)
                pool.wait(calls, self._wake, *([0.0] if self._added else []))
                pool.look(calls)
                self._turns += 1
                time.sleep(_BREATH_S)
        except BaseException as error:
            self._error = error
        finally:
            pool.drop_calls()  # a late answer would be taken for one of the next samples


class _Calls:
    """The samples of one `Scoring`. n_open: without an outcome. alone: waiting, to be sent one at a time."""

    def __init__(self) -> None:
        self.outcomes: dict[int, RewardOutcome] = {}
        self.n_open = 0
        self.n_timeouts = self.n_answers = 0
        self.n_unanswered = 0  # timeouts since the last answer, which came at answered_at
        self.answered_at = time.monotonic()
        self._payloads: dict[int, bytes] = {}
        self.alone: deque[int] = deque()
        self.waiting: deque[int] = deque()

    def add(self, position: int, record: Record) -> None:
        """One more sample."""
        if not self.n_open:
            self.answered_at = time.monotonic()
        self.n_open += 1
        try:
            self._payloads[position] = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # an object may raise anything when it is pickled
            text = f"the record cannot be sent to the reward process: {type(error).__name__}: {error}"
            self.settle(position, RewardOutcome(None, "error", text))
        else:
            self.waiting.append(position)

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

    def give_up(self, outcome: RewardOutcome) -> None:
        """Every sample without an outcome gets this one."""
        self.waiting.clear()
        self.alone.clear()
        for position in list(self._payloads):
            self.settle(position, outcome)

    def settle(self, position: int, outcome: RewardOutcome) -> None:
        self._payloads.pop(position, None)
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


def report_failures(records: Sequence[Record], outcomes: Sequence[RewardOutcome], key: str = KEY) -> None:
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
