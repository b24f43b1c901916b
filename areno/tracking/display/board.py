"""The course of a scalar in a few characters.

What the live display knows of a run: the course of its scalars, the step under way, a few samples, warnings.
"""

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
from areno.tracking.run_log import OwnHandler
from areno.tracking.tracker import Tracker
from areno.types import ScoredSample

POINTS = 128
"""A trend has at least half as many points, once there were that many values, and less than twice as many."""
_BARS = "▁▂▃▄▅▆▇█"


class Trend:
    """The values of a scalar so far, as means over equally many of them, so that a long run takes no more memory."""

    def __init__(self) -> None:
        self.last = math.nan
        self._means: list[float] = []
        self._open: list[float] = []  # values of the next mean
        self._size = 1  # values in a mean

    def add(self, value: float) -> None:
        """Take the next value. One that is not finite is left out of its mean."""
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
        """The means, oldest first, those of the newest values included."""
        return self._means + ([_mean(self._open)] if self._open else [])


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters: low bars for low values. A space stands where no value was finite."""
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


SAMPLES_S = 10.0
"""Samples stay so long before those of a later step take their place."""
N_SAMPLES = 3
_LAST_STEPS = 50  # whose time says how long the rest of the run takes
_PHASES = {
    "rollout": "rollout",
    "reward": "scoring",
    "ref": "reference",
    "values": "values",
    "advantage": "advantages",
    "recompute": "recomputing log-probabilities",
    "train": "training",
    "train_critic": "training the critic",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True)
class Shown:
    """A sample to show: its reward, or in words why it has none."""

    reward: str
    prompt: str
    completion: str
    n_tokens: int


@dataclass
class Look:
    """A copy of what is known at one moment, for a thread that draws. Times are in seconds.

    step: that is done. left: until the end of the run; None where that is not known yet. phase: of the step under way,
    "" between steps. work: what the phase has done so far. times: of the last step, by phase.
    """

    step: int
    total: int
    elapsed: float
    left: float | None
    phase: str
    work: str
    times: Mapping[str, float]
    trends: Mapping[str, tuple[float, Sequence[float]]] = field(default_factory=dict)
    samples: Sequence[Shown] = ()
    samples_step: int = 0
    n_warnings: int = 0
    warning: str = ""
    note: str = ""


class Board(Tracker):
    """Follows a run. total_steps: see open_trackers. seconds: how long the run has taken so far.

    Methods may be called in any thread.
    """

    def __init__(self, total_steps: Callable[[], int], seconds: Callable[[], float]):
        self._total_steps, self._seconds = total_steps, seconds
        self._lock = threading.Lock()
        self._trends: dict[str, Trend] = {}
        self._times: dict[str, float] = {}
        self._step = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=_LAST_STEPS + 1)  # steps, and when they were done
        self._samples: list[ScoredSample] = []
        self._samples_step, self._samples_at = 0, -SAMPLES_S
        self._warnings: deque[str] = deque(maxlen=1)
        self._n_warnings = 0
        self.note = ""  # that the run will stop soon, for one

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in scalars.items():
                if name.startswith("time/"):
                    self._times[name[5:]] = value
                else:
                    self._trends.setdefault(name, Trend()).add(value)
            if "time/step" in scalars:
                self._times = {name[5:]: value for name, value in scalars.items() if name.startswith("time/")}
                self._step = step
                self._ends.append((step, time.monotonic()))

    def forget(self) -> None:
        """Drop what steps have told: they come again."""
        with self._lock:
            self._trends.clear()
            self._samples = []

    def recall(self, name: str, value: float) -> None:
        """Take a value that an earlier session has recorded."""
        with self._lock:
            self._trends.setdefault(name, Trend()).add(value)

    @property
    def has_steps(self) -> bool:
        """Whether there is something to tell of."""
        return bool(self._trends)

    def begin(self, step: int) -> None:
        """The first step begins, or the one after `step`. What came before does not count for the time left."""
        with self._lock:
            self._step = step
            self._ends.clear()
            self._ends.append((step, time.monotonic()))

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        now = time.monotonic()
        if now - self._samples_at < SAMPLES_S:
            return
        chosen = best_middle_worst(samples)
        with self._lock:
            self._samples, self._samples_step, self._samples_at = chosen, step, now

    def warn(self, text: str) -> None:
        """Take a warning that the run has given."""
        self._warnings.append(text)
        self._n_warnings += 1

    def look(self) -> Look:
        """How things stand now."""
        phase = " · ".join(dict.fromkeys(_PHASES[name] for name, _ in heartbeat.work() if name in _PHASES))
        now = time.monotonic()
        with self._lock:
            total = max(self._total_steps(), self._step)
            return Look(
                step=self._step,
                total=total,
                elapsed=self._seconds(),
                left=self._left(now, total),
                phase=phase,
                work=_work(),
                times=dict(self._times),
                trends={name: (trend.last, trend.values) for name, trend in self._trends.items()},
                samples=[_shown(sample) for sample in self._samples],
                samples_step=self._samples_step,
                n_warnings=self._n_warnings,
                warning="".join(self._warnings),
                note=self.note,
            )

    def _left(self, now: float, total: int) -> float | None:
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        each = (ended - began) / (last - first)
        return max(0.0, (total - last) * each - (now - ended)) if total > last else 0.0


class Warnings(OwnHandler):
    """Gives the warnings of a run to its board."""

    def __init__(self, board: Board):
        super().__init__(logging.WARNING)
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        self._board.warn(record.getMessage())


def best_middle_worst(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
    """Samples with the highest and the lowest reward and one between them, of several prompts if there are."""
    scored = sorted(
        (sample for sample in samples if sample.outcome.value is not None),
        key=lambda sample: sample.outcome.value or 0.0, reverse=True,
    )  # fmt: skip
    if not scored:
        return list(samples[:N_SAMPLES])
    places = dict.fromkeys((0, len(scored) // 2, len(scored) - 1))
    return [scored[place] for place in places]


def _shown(sample: ScoredSample) -> Shown:
    value = sample.outcome.value
    reward = sample.outcome.status if value is None else f"{value:.3g}"
    return Shown(reward, sample.item.prompt, sample.completion, sample.sequence.n_tokens)


def _work() -> str:
    """What is done of a rollout, in words."""
    for one in console.under_way[-1:]:
        rate = f", {one.rate:,.0f} tok/s" if one.tokens else ""
        return f"{one.done}/{one.total} {one.unit}{rate}"
    return ""
