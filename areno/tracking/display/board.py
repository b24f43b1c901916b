"""The data of the live display: recent scalars, the progress of the run, a few samples, and warnings."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areno import heartbeat
from areno.tracking import console
from areno.tracking.run_log import ArenoHandler
from areno.tracking.tracker import Tracker
from areno.types import ScoredSample

POINTS = 128
"""The length of a trend. A long trend has at least half as many points, and less than twice as many."""
_BARS = "▁▂▃▄▅▆▇█"


class Trend:
    """The course of a scalar over the whole run, compressed to at most 2 * POINTS points.

    Each point is the mean of equally many consecutive values. When there are too many points, neighbouring points are
    averaged in pairs.
    """

    def __init__(self) -> None:
        self.last = math.nan
        self._means: list[float] = []
        self._open: list[float] = []  # the values of the next mean
        self._size = 1  # values in a mean

    def add(self, value: float) -> None:
        """Add the next value. A value that is NaN or infinite does not count in the means."""
        self.last = value
        self._open.append(value)
        if len(self._open) == self._size:
            self._means.append(_mean(self._open))
            self._open = []
        if len(self._means) == 2 * POINTS:
            self._means = [_mean(self._means[at : at + 2]) for at in range(0, 2 * POINTS, 2)]
            self._size *= 2

    @property
    def values(self) -> list[float]:
        return self._means + ([_mean(self._open)] if self._open else [])


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as a line of Unicode bars, whose heights range from the smallest to the largest value.

    Neighbours are averaged if there are more than `width` values. NaN and infinite values are spaces.
    """
    if width < 1:
        return ""
    if len(values) > width:
        edges = [len(values) * at // width for at in range(width + 1)]
        values = [_mean(values[start:end]) for start, end in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        return "".join(_BARS[0] if math.isfinite(value) else " " for value in values)
    steps = (len(_BARS) - 1) / (high - low)
    return "".join(_BARS[round((value - low) * steps)] if math.isfinite(value) else " " for value in values)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


SAMPLES_S = 10.0  # seconds for which samples are shown before those of a later step replace them
N_SAMPLES = 3
_LAST_STEPS = 50  # the remaining time is estimated from the time of these steps
_PHASES = {
    "rollout": "rollout",
    "reward": "scoring",
    "ref": "reference",
    "teacher": "teacher",
    "values": "values",
    "advantage": "advantages",
    "recompute": "recomputing log-probabilities",
    "train": "training",
    "train_critic": "training the critic",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True)
class ShownSample:
    reward: str  # or the status of scoring, such as "timeout"
    prompt: str
    completion: str
    n_tokens: int  # of the completion


@dataclass
class Snapshot:
    """What the drawing thread shows. All times are in seconds."""

    step: int
    total: int
    elapsed: float
    left: float | None  # estimated time until the end of the run
    phase: str  # current phases of the step
    work: str  # such as "12/64 prompts"
    times: Mapping[str, float]  # of each phase of the last step, and of the whole under "step"
    trends: Mapping[str, tuple[float, Sequence[float]]] = field(default_factory=dict)
    samples: Sequence[ShownSample] = ()
    samples_step: int = 0
    n_warnings: int = 0
    warning: str = ""
    note: str = ""  # a message such as that the run will stop soon


class Board(Tracker):
    """Collects the data of the live display. Its methods may be called from any thread.

    `note` is a message that the display shows in place of the current phase.
    """

    def __init__(self, total_steps: Callable[[], int], seconds: Callable[[], float]):
        self._total_steps, self._seconds = total_steps, seconds
        self._lock = threading.Lock()
        self._trends: dict[str, Trend] = {}
        self._times: dict[str, float] = {}
        self._step = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=_LAST_STEPS + 1)  # steps, with the time of their end
        self._samples: list[ScoredSample] = []
        self._samples_step, self._samples_at = 0, -SAMPLES_S
        self._warnings: deque[str] = deque(maxlen=1)
        self._n_warnings = 0
        self.note = ""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in scalars.items():
                if name.startswith("time/"):
                    self._times[name[5:]] = value
                else:
                    self._trends.setdefault(name, Trend()).add(value)
            for space in ("rollout", "eval"):
                if f"{space}/rewards_mean" in scalars and f"{space}/accuracy" not in scalars:
                    self._trends.pop(f"{space}/accuracy", None)  # a reward above 1 was seen
            if "time/step" in scalars:
                self._times = {name[5:]: value for name, value in scalars.items() if name.startswith("time/")}
                self._step = step
                self._ends.append((step, time.monotonic()))

    def clear(self) -> None:
        """Drop all trends and samples, because the run returns to an earlier step."""
        with self._lock:
            self._trends.clear()
            self._samples = []

    def add_recorded(self, name: str, value: float) -> None:
        """Add a value that the run recorded before it was resumed. Call this in the order of the steps."""
        with self._lock:
            self._trends.setdefault(name, Trend()).add(value)

    @property
    def has_steps(self) -> bool:
        """Return whether any scalar other than time/* has been recorded."""
        return bool(self._trends)

    def begin_training(self, step: int) -> None:
        """Record that training starts after `step`. The remaining time is estimated only from the steps that follow."""
        with self._lock:
            self._step = step
            self._ends.clear()
            self._ends.append((step, time.monotonic()))

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Show samples of this step, unless those on the display are younger than SAMPLES_S seconds."""
        now = time.monotonic()
        if now - self._samples_at < SAMPLES_S:
            return
        chosen = best_middle_worst(samples)
        with self._lock:
            self._samples, self._samples_step, self._samples_at = chosen, step, now

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._n_warnings += 1

    def snapshot(self) -> Snapshot:
        phase = " · ".join(dict.fromkeys(_PHASES[name] for name, _ in heartbeat.work() if name in _PHASES))
        now = time.monotonic()
        with self._lock:
            total = max(self._total_steps(), self._step)
            return Snapshot(
                step=self._step,
                total=total,
                elapsed=self._seconds(),
                left=self._seconds_left(now, total),
                phase=phase,
                work=_work_text(),
                times=dict(self._times),
                trends={name: (trend.last, trend.values) for name, trend in self._trends.items()},
                samples=[_shown_sample(sample) for sample in self._samples],
                samples_step=self._samples_step,
                n_warnings=self._n_warnings,
                warning="".join(self._warnings),
                note=self.note,
            )

    def _seconds_left(self, now: float, total: int) -> float | None:
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        each = (ended - began) / (last - first)
        return max(0.0, (total - last) * each - (now - ended)) if total > last else 0.0


class WarningHandler(ArenoHandler):
    """A logging handler that passes warnings and errors to a board."""

    def __init__(self, board: Board):
        super().__init__(logging.WARNING)
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        self._board.warn(record.getMessage())


def best_middle_worst(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
    """Return the samples with the highest, the median and the lowest reward, without duplicates.

    If no sample has a reward, return the first N_SAMPLES samples.
    """
    scored = sorted(
        (sample for sample in samples if sample.outcome.value is not None),
        key=lambda sample: sample.outcome.value or 0.0,
        reverse=True,
    )
    if not scored:
        return list(samples[:N_SAMPLES])
    places = dict.fromkeys((0, len(scored) // 2, len(scored) - 1))
    return [scored[place] for place in places]


def _shown_sample(sample: ScoredSample) -> ShownSample:
    value = sample.outcome.value
    reward = sample.outcome.status if value is None else f"{value:.3g}"
    return ShownSample(reward, sample.item.prompt, sample.completion, sample.sequence.n_tokens)


def _work_text() -> str:
    for one in console.active_progress[-1:]:
        rate = f", {one.tokens_per_second:,.0f} tok/s" if one.tokens else ""
        return f"{one.done}/{one.total} {one.unit}{rate}"
    return ""
