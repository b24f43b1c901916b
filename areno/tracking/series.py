"""The recorded values of scalars, which may be thinned while they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from areno.tracking.accuracy import has_reward_above_one, without_accuracy_metrics

MAX_POINTS = 4_000  # of one curve; more than a screen can show
_AT_ONCE = 1_024  # records between two times of thinning
_LAST = 5  # points that stay as they are, since results are means over the last steps
_MERGED = 4  # points that become two: their minimum and their maximum


class Series(NamedTuple):
    """The recorded values of one scalar. NaN stands for a value that was NaN or infinite."""

    steps: list[int]
    values: list[float]


NOTHING = Series([], [])


class Curves:
    """Collects curves that keep about MAX_POINTS points each, so that a long run needs little memory.

    Consecutive points are grouped into intervals. The minimum and the maximum of each interval are kept, so no peak is
    lost. Intervals are merged when there are too many. The first point and the last points of a curve stay as they are.
    """

    def __init__(self) -> None:
        self._n_records = 0
        self._records: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # by the names of their scalars
        self._new: dict[str, Series] = {}  # not thinned yet
        self._kept: dict[str, Series] = {}
        self._widths: dict[str, int] = {}  # points of an interval

    def add(self, record: dict[str, Any]) -> None:
        """Add a line of logs/metrics.jsonl. Add lines in the order of their steps."""
        self._records.setdefault(tuple(record), []).append(record)
        self._n_records += 1
        if self._n_records % _AT_ONCE == 0:
            self._read_records()
            self._thin_values()

    def _read_records(self) -> None:
        for names, records in self._records.items():
            steps = [record["step"] for record in records]
            for name, values in zip(names, zip(*(record.values() for record in records), strict=True), strict=True):
                if name in ("step", "time"):
                    continue
                new = self._new.setdefault(name, Series([], []))
                is_sorted = not new.steps or new.steps[-1] <= steps[0]
                new.steps.extend(steps)
                new.values.extend(
                    [math.nan if value is None else value for value in values] if None in values else values
                )
                if not is_sorted:  # records with other names have this scalar, too
                    order = sorted(range(len(new.steps)), key=new.steps.__getitem__)
                    new.steps[:], new.values[:] = [new.steps[i] for i in order], [new.values[i] for i in order]
        self._records = {}

    def _thin_values(self) -> None:
        for name, (steps, values) in self._new.items():
            n_old = max(0, len(steps) - _LAST)
            kept, width = self._kept.setdefault(name, Series([], [])), self._widths.get(name, 1)
            found = _thinned(Series(steps[:n_old], values[:n_old]), width)
            kept.steps.extend(found.steps)
            kept.values.extend(found.values)
            del steps[:n_old], values[:n_old]
            while len(kept.steps) > MAX_POINTS:
                first = Series(kept.steps[:1], kept.values[:1])
                rest = _thinned(Series(kept.steps[1:], kept.values[1:]), _MERGED)
                kept = self._kept[name] = Series(first.steps + rest.steps, first.values + rest.values)
                self._widths[name] = width = max(_MERGED, 2 * width)

    def series_by_name(self) -> dict[str, Series]:
        self._read_records()
        kept = self._kept
        return {
            name: Series(kept.get(name, NOTHING).steps + new.steps, kept.get(name, NOTHING).values + new.values)
            for name, new in self._new.items()
        }


def _thinned(series: Series, width: int) -> Series:
    """Keep the minimum and the maximum of each `width` points. NaN is kept only where there is nothing else."""
    if width == 1 or not series.steps:
        return series
    import numpy as np  # takes long, and lists of runs do not need it

    values = np.array(series.values, dtype=np.float64)
    values = np.append(values, np.full(-len(values) % width, np.nan)).reshape(-1, width)
    starts, missing = np.arange(0, values.size, width), np.isnan(values)
    lowest, highest = np.where(missing, np.inf, values).argmin(1), np.where(missing, -np.inf, values).argmax(1)
    places = np.unique(np.concatenate([starts + lowest, starts + highest])).tolist()
    return Series([series.steps[place] for place in places], [series.values[place] for place in places])


def is_accuracy_meaningful(read: Callable[[str], Series]) -> bool:
    """Return whether the metrics that count right answers have a meaning. They have none if a reward was above 1.

    A run no longer records these metrics after such a reward. `read(name)` returns the recorded values of a scalar.
    """
    for space in ("rollout", "eval"):
        rewards, right = read(f"{space}/rewards_mean").steps, read(f"{space}/accuracy").steps
        if rewards and right and rewards[-1] > right[-1]:
            return False
    return not has_reward_above_one(read("rollout/rewards_max").values)


def drop_meaningless_accuracy(metrics: Mapping[str, Series]) -> dict[str, Series]:
    """Leave out the metrics that count right answers if they have no meaning."""
    are_meaningful = is_accuracy_meaningful(lambda name: metrics.get(name, NOTHING))
    return dict(metrics) if are_meaningful else without_accuracy_metrics(metrics)
