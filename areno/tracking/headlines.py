"""The numbers that say how a run went: the first, the best and the last value of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from areno.tracking.reader import RunReader, Series

# Scalar -> what it is called, and which of its values is the best; None where none is.
NAMES: dict[str, tuple[str, Callable[..., float] | None]] = {
    "eval/accuracy": ("evaluation: accuracy", max),
    "eval/rewards_mean": ("evaluation: reward", max),
    "eval/loss": ("evaluation: loss", min),
    "rollout/rewards_mean": ("reward", max),
    "train/loss": ("loss", None),
    "rollout/response_len_mean": ("response length", None),
    "train/entropy": ("entropy", None),
    "train/logp_abs_diff_mean": ("rollout against training", None),
    "time/step": ("seconds of a step", None),
}


class Headline(NamedTuple):
    """One number of a run. best: None where no value is better than another. step: at which it was best."""

    title: str
    first: float
    best: float | None
    last: float
    step: int | None


def headlines(metrics: Mapping[str, Series]) -> dict[str, Headline]:
    """Scalar -> its headline, for those of NAMES that a run has."""
    found: dict[str, Headline] = {}
    for name, (title, choose) in NAMES.items():
        series = metrics.get(name, Series([], []))
        finite = [(value, step) for step, value in zip(*series, strict=True) if math.isfinite(value)]
        if finite:
            best = choose(value for value, _ in finite) if choose else None
            step = next((step for value, step in finite if value == best), None)
            found[name] = Headline(title, finite[0][0], best, finite[-1][0], step)
    return found


def last_step(metrics: Mapping[str, Series]) -> int:
    """The last step that a run has recorded something of; 0 before the first."""
    return max((series.steps[-1] for series in metrics.values()), default=0)


def seconds(run: RunReader) -> float | None:
    """From the first to the last record of a run, with the first step; None without two records."""
    times = [record["time"] for record in run.records() if "time" in record]
    steps = run.metrics().get("time/step", Series([], []))[1]
    return times[-1] - times[0] + (steps[0] if steps else 0.0) if len(times) > 1 else None


def duration(taken: float | None) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    if taken is None:
        return "-"
    minutes, rest = divmod(round(taken), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
