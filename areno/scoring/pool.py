"""The pool of reward processes, as the driver uses it: sends samples to the processes and collects the rewards.

The user's reward function runs in separate processes (process.py is their code). So it can print, hang, crash or leak
memory without harm to the run. Every call has a hard time limit. If a call exceeds the limit or crashes the process,
only its sample has no reward. The pool replaces the process and scores the other samples. A timeout or an error is
recorded as such, and not as a reward of 0.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Pipe
from typing import Any

from areno import heartbeat
from areno.config.reward import RewardConfig
from areno.errors import ArenoError, EngineError, Problem
from areno.scoring.functions import KEY, Given, joined_names, reward_functions
from areno.scoring.records import Record
from areno.types import RewardOutcome, RewardRecord
from areno.user_processes.pool import Failure, SlowCallTimer, WorkerPool, default_workers
from areno.user_processes.worker import Worker

logger = logging.getLogger("areno.scoring")

_MAX_CHUNK = 32  # records sent at once to a plain function, which scores them one after another; see _CHUNK_S
_MAX_TOGETHER = 64  # calls of an async function that run at once in one process
_MAX_TIMEOUTS = 4  # per process without an answer, before the rest is given up, which could take hours
_LOOK_S = 0.5
_BATCH_WAIT_S = 0.0003  # between turns, so that one turn handles several answers
_CHUNK_S = 0.005  # a process with a fast plain function gets the calls of so many seconds, or it waits for turns
QUIET_S = 600.0  # a function that has answered before is given up only after this long without an answer
_LOGGED_FAILURES = 3
_LOGGED_CHARS = 300


class RewardPool(WorkerPool[RewardConfig]):
    """A pool of processes that call the reward functions of a run. Use it in a `with` block.

    `function` is a function or a list of functions that a script passes in. None uses the functions in the settings.
    `sources` maps the name of a source to its own functions. With `tracebacks`, error messages are tracebacks. `call_s`
    is the mean time of a call in the last `Scoring`. One CPU core is left for each of the `n_devices` device workers.
    """

    section, module = "reward", "areno.scoring.process"
    ended_text, late_text = "ended its process ({})", "no answer within {:g} s (reward.timeout_s)"
    import_text = "importing it {}"

    def __init__(
        self,
        config: RewardConfig,
        function: Given | None = None,
        tracebacks: bool = False,
        n_devices: int = 0,
        sources: Mapping[str, str | list[str] | None] | None = None,
    ):
        name = " + ".join(filter(None, [joined_names(config, function), *map(_as_text, (sources or {}).values())]))
        super().__init__(config, name, config.workers or default_workers(n_devices))
        self._given, self._tracebacks, self._sources = function, tracebacks, sources or {}
        self._has_answered = False
        self.call_s = math.inf  # the mean of the last step

    def _build_first_message(self) -> tuple[Any, ...]:
        """Return (functions, setting to name in errors, time limit in seconds, tracebacks) for a new process."""
        functions = reward_functions(self.config, self._given, self._sources)
        return functions, KEY, self.config.timeout_s, self._tracebacks

    def scores(self, source: str) -> bool:
        """Whether a function scores the samples of a source."""
        return bool(self._sources.get(source)) or self._given is not None or self.config.fn is not None

    def score(self, records: Sequence[RewardRecord]) -> list[RewardOutcome]:
        """Score samples, and log the first failures. Raises ArenoError if no sample could be scored."""
        outcomes = self.compute_outcomes(records)
        report_failures(records, outcomes)
        if outcomes and all(outcome.value is None for outcome in outcomes):
            raise no_reward_error(outcomes)
        return outcomes

    def compute_outcomes(self, records: Sequence[RewardRecord]) -> list[RewardOutcome]:
        """Score samples. Failures are not logged."""
        with self.scoring() as scoring:
            scoring.add(dict(enumerate(records)))
            return [scoring.collect_outcomes()[position] for position in range(len(records))]

    def scoring(self) -> Scoring:
        """Return a context manager that scores samples in a thread, during the rollout. Only one may be open."""
        if not self.workers:
            raise EngineError("the reward processes are not running; call start() first")
        self.output.begin_step()
        return Scoring(self)

    def check_progress(self, calls: _ScoringCalls) -> None:
        """If the processes no longer answer, record a timeout for all samples without an outcome."""
        self._has_answered = self._has_answered or calls.n_answers > 0
        quiet_s = time.monotonic() - calls.answered_at
        if calls.n_unanswered >= _MAX_TIMEOUTS * len(self.workers) and (quiet_s >= QUIET_S or not self._has_answered):
            self._give_up(calls, quiet_s)

    def slow_scoring_text(self, calls: _ScoringCalls, seconds: float) -> str:
        """Return a log line: how many samples are not scored yet, how long this may take, and what to set."""
        config, n_together = self.config, max(_MAX_TOGETHER * worker.is_async or 1 for worker in self.workers)
        max_s = math.ceil(calls.n_open / (n_together * len(self.workers))) * config.timeout_s
        return (
            f"rewards: {calls.n_open} of {calls.n_open + len(calls.outcomes)} samples wait after {seconds:.0f} s "
            f"({calls.n_timeouts} timeouts), for at most {_duration_text(max_s)} more; raise reward.workers "
            f"({self.n_workers}) or lower reward.timeout_s ({config.timeout_s:g} s) to shorten this"
        )

    def _give_up(self, calls: _ScoringCalls, quiet_s: float) -> None:
        """Record a timeout for every sample without an outcome. The last answer came `quiet_s` seconds ago."""
        text = "not scored: the {} calls before it had no answer within {:g} s (reward.timeout_s)"
        text = text.format(calls.n_unanswered, self.config.timeout_s)
        logger.warning("rewards: no answer for %s; giving up %d samples", _duration_text(quiet_s), calls.n_open)
        self.restart_busy_workers()
        calls.give_up(RewardOutcome(None, "timeout", text))


class Scoring(AbstractContextManager["Scoring"]):
    """Scores samples in a thread as they arrive. The caller chooses a number for each sample.

    Use it as a context manager. If the context ends before `compute_outcomes` has returned, the remaining samples are
    not scored. Methods raise ArenoError if scoring has failed, for example because a function cannot be loaded.
    """

    def __init__(self, pool: RewardPool):
        self._pool, self._calls = pool, _ScoringCalls(pool.call_s)
        self._added: deque[tuple[int, Record]] = deque()
        self._turns = 0  # the number of iterations of the thread
        self._is_last = self._is_dropped = False
        self._error: BaseException | None = None
        self._wake, self._woken = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._score_in_thread, daemon=True, name="areno-rewards")
        self._thread.start()

    def add(self, records: Mapping[int, Record]) -> None:
        """Add samples, without waiting. Each number may be used once."""
        self._raise_error()
        self._added.extend(records.items())
        self._wake_thread()

    def collect_outcomes(self) -> dict[int, RewardOutcome]:
        """Wait until all samples are scored. After this call, no sample may be added."""
        self._is_last = True
        self._wake_thread()
        self._wait_until(lambda: False, lambda: self._thread.join(_LOOK_S))
        self._raise_error()
        return self._calls.outcomes

    def _wait_until(self, is_over: Callable[[], bool], wait: Callable[[], None]) -> None:
        """Call `wait_for_answers` again and again until `is_over` returns True or the thread has ended."""
        slow, turns = SlowCallTimer(), -1
        while self._thread.is_alive() and not is_over():
            wait()
            if turns != self._turns:  # the thread is alive, and it enforces the time limit of each call
                turns = self._turns
                heartbeat.beat()
            if slow.is_due() and self._calls.n_open:
                logger.info(self._pool.slow_scoring_text(self._calls, slow.elapsed_seconds))

    @property
    def n_scored(self) -> int:
        return len(self._calls.outcomes)

    def wait_for_outcomes(self, numbers: Sequence[int]) -> list[RewardOutcome]:
        """Wait for the outcomes of some samples and return them. Other samples may still be added."""
        self._wait_until(lambda: self.are_scored(numbers), lambda: time.sleep(_BATCH_WAIT_S))
        self._raise_error()
        return [self._calls.outcomes[number] for number in numbers]

    def are_scored(self, numbers: Iterable[int]) -> bool:
        return all(number in self._calls.outcomes for number in numbers)

    def span_of(self, number: int) -> tuple[int, int] | None:
        """Return (start, end) of a sample's scoring, as times of areno.trace. None if no process has answered."""
        return self._calls.spans.get(number)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            self._woken.send_bytes(b".")

    def __exit__(self, *exc: object) -> None:
        self._is_dropped = True
        self._wake_thread()
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _score_in_thread(self) -> None:
        """Run the thread: send samples and receive outcomes until all are scored."""
        pool, calls = self._pool, self._calls
        try:
            while not (self._is_dropped or (self._is_last and not self._added and not calls.n_open)):
                # A few at a time, so that processes score the first ones while the thread pickles the others.
                for _ in range(min(_MAX_CHUNK, len(self._added))):
                    calls.add(*self._added.popleft())
                pool.send_calls(calls)
                pool.wait_for_answers(calls, self._wake, *([0.0] if self._added else []))
                pool.check_progress(calls)
                self._turns += 1
                if not self._added:
                    time.sleep(_BATCH_WAIT_S)
        except BaseException as error:
            self._error = error
        finally:
            pool.call_s = calls.mean_call_s
            pool.restart_busy_workers()  # a late answer would count for one of the next samples


class _ScoringCalls:
    """The samples of one `Scoring` by number, their outcomes, and the times (start, end) of their calls.

    `waiting` are samples still to be sent. `alone` are samples to be sent one at a time, because one of them may crash
    its process. `n_answers` counts outcomes other than timeouts. The last such outcome came at `answered_at`
    (time.monotonic). `n_unanswered` counts timeouts since then.
    """

    def __init__(self, call_s: float) -> None:
        self._expected_call_s, self._busy_ns = call_s, 0
        self.outcomes: dict[int, RewardOutcome] = {}
        self.spans: dict[int, tuple[int, int]] = {}
        self.n_open = 0
        self.n_timeouts = self.n_answers = 0
        self.n_unanswered = 0  # timeouts since the last answer, which came at answered_at
        self.answered_at = time.monotonic()
        self._payloads: dict[int, bytes] = {}
        self.alone: deque[int] = deque()
        self.waiting: deque[int] = deque()

    def add(self, position: int, record: Record) -> None:
        """Add a sample. If the record cannot be pickled, the outcome is an error."""
        if not self.n_open:
            self.answered_at = time.monotonic()
        self.n_open += 1
        try:
            self._payloads[position] = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # an object may raise anything when it is pickled
            text = f"the record cannot be sent to the reward process: {type(error).__name__}: {error}"
            self.record_outcome(position, RewardOutcome(None, "error", text))
        else:
            self.waiting.append(position)

    def record_answer(self, position: int, answer: tuple[Any, ...], span: tuple[int, int]) -> None:
        """Record the answer (status, reward, message, parts of the reward) of a process, and the time that it took."""
        self.spans[position] = span
        self._busy_ns += span[1] - span[0]
        status, value, text, parts = answer
        self.record_outcome(position, RewardOutcome(value, status, text, parts))

    def handle_lost_worker(self, worker: Worker, status: Failure, text: str) -> None:
        """Record a failure for the sample that crashed or blocked a process. Send the other samples of its chunk again.

        If a process with an async function dies, it is unknown which of its samples crashed it. All of them are then
        sent again, one at a time.
        """
        if worker.is_async and worker.sent > 1:
            self.alone.extend(worker.chunk)  # sent one at a time, the sample that crashed the process is found
        elif worker.chunk:
            first, *others = worker.chunk
            self.record_outcome(first, RewardOutcome(None, status, text))
            self.waiting.extendleft(reversed(others))

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        """Choose the samples to send to an idle process.

        The chunks get smaller towards the end, so that all processes finish at about the same time. If calls are fast,
        a chunk is large enough to take _CHUNK_S seconds, because the driver delays each chunk. But it has at most an
        equal share of the waiting samples.
        """
        if self.alone:
            position = self.alone.popleft()
            return [(position, self._payloads[position])]
        equal_share = math.ceil(len(self.waiting) / n_workers)
        if is_async:
            size = min(_MAX_TOGETHER, equal_share)
        else:
            least = min(int(_CHUNK_S / max(self.mean_call_s, 1e-9)), equal_share)
            size = max(least, min(_MAX_CHUNK, math.ceil(len(self.waiting) / (4 * n_workers))))
        positions = [self.waiting.popleft() for _ in range(size)]
        return [(position, self._payloads[position]) for position in positions]

    @property
    def mean_call_s(self) -> float:
        """Mean seconds of a call, including its wait for the driver. Before the first answer, an expected value."""
        return 1e-9 * self._busy_ns / len(self.spans) if self.spans else self._expected_call_s

    def give_up(self, outcome: RewardOutcome) -> None:
        """Record the same outcome for every sample that has none yet."""
        self.waiting.clear()
        self.alone.clear()
        for position in list(self._payloads):
            self.record_outcome(position, outcome)

    def record_outcome(self, position: int, outcome: RewardOutcome) -> None:
        self._payloads.pop(position, None)
        self.outcomes[position] = outcome
        self.n_open -= 1
        if outcome.status == "timeout":
            self.n_timeouts += 1
            self.n_unanswered += 1
        else:
            self.n_answers += 1
            self.n_unanswered, self.answered_at = 0, time.monotonic()


def _as_text(specs: str | list[str] | None) -> str:
    return specs if isinstance(specs, str) else " + ".join(specs or [])


def _duration_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def report_failures(records: Sequence[Record], outcomes: Sequence[RewardOutcome]) -> None:
    """Log the first samples that could not be scored, and the number of failures."""
    failed = [(outcome, record) for outcome, record in zip(outcomes, records, strict=True) if outcome.status != "ok"]
    for outcome, record in failed[:_LOGGED_FAILURES]:
        sample = (_shortened_repr(value) for value in (record.prompt, record.completion, record.solutions))
        text = "reward %s: %s; sample: prompt=%s completion=%s solutions=%s"
        logger.warning(text, outcome.status, outcome.message, *sample)
    if len(failed) > _LOGGED_FAILURES:
        logger.warning("reward: %d samples of %d could not be scored", len(failed), len(outcomes))


def no_reward_error(outcomes: Sequence[RewardOutcome]) -> ArenoError:
    """Return the error to raise if no sample has a reward. It quotes the last failure."""
    text = "no reward could be computed for any of the {} samples; the last: {}: {}"
    last = outcomes[-1]
    return ArenoError(Problem(last.key, text, len(outcomes), last.status, last.message))


def _shortened_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LOGGED_CHARS else text[: _LOGGED_CHARS - 3] + "..."
