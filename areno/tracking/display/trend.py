"""The course of a scalar in a few characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
