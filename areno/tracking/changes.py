"""Find changes of a scalar that its own noise does not explain.

The noise is measured on the series itself, so the thresholds below hold for every scalar, task and model. It is a
median of differences of successive values: neither a trend nor a single outlier makes it larger.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

BEFORE = 20
"""How many earlier values a change is compared with, at most."""
FEWEST = 8
"""How many earlier values are needed. With fewer, nothing is found."""
LASTING = 5
"""How many values in a row a lasting change needs."""
BEYOND = 3.0
"""Standard deviations of the noise that each value of a lasting change exceeds. By chance, 5 do so once in 1e14."""
FAR = 8.0
"""Standard deviations of a change that counts alone. Scalars have heavier tails than normal numbers."""
_LEAST_LOG_NOISE = 0.25  # of a positive estimate, such as a KL divergence: it differs by so much between equal steps
_NORMAL = 1.4826 / math.sqrt(2)  # times the median of |x - y| of two normal numbers is their standard deviation


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of a series around its trend."""
    return _NORMAL * statistics.median(abs(b - a) for a, b in itertools.pairwise(values))


def is_jump(values: Sequence[float], harmless: float) -> bool:
    """Return whether the last value is far above those before it, in a single step.

    Values are compared by their logarithms. Those below `harmless` count as `harmless`.
    """
    *before, last = [math.log(max(value, harmless)) for value in values[-BEFORE - 1 :]] or [math.nan]
    if len(before) < FEWEST or any(map(math.isnan, [*before, last])):
        return False
    return last - max(statistics.median(before), before[-1]) > FAR * max(noise(before), _LEAST_LOG_NOISE)


def gain(values: Sequence[float]) -> float:
    """Return the difference of the medians of the last LASTING values and of those before, in units of the noise."""
    before, last = values[-BEFORE - LASTING : -LASTING], values[-LASTING:]
    if len(before) < FEWEST:
        return 0.0
    difference = statistics.median(last) - statistics.median(before)
    return difference / noise(before) if noise(before) else math.copysign(math.inf, difference) if difference else 0.0


def without_trend(values: Sequence[float]) -> list[float]:
    """Return the latest values minus the line through those before the last LASTING ones (median of slopes)."""
    latest = list(values[-BEFORE - LASTING :])
    before = latest[:-LASTING]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(before), 2)]
    slope = statistics.median(slopes) if slopes else 0.0
    return [value - slope * index for index, value in enumerate(latest)]


def lasting_change(values: Sequence[float], least_noise: float = 0.0, beyond: float = BEYOND) -> float:
    """Return by how much the last LASTING values differ from those before, as a difference of medians.

    0 unless each of them is more than `beyond` standard deviations away, all on one side. The noise is at least
    `least_noise`.
    """
    before, last = values[-BEFORE - LASTING : -LASTING], values[-LASTING:]
    if len(before) < FEWEST or not all(map(math.isfinite, [*before, *last])):
        return 0.0
    level, limit = statistics.median(before), beyond * max(noise(before), least_noise)
    if min(last) > level + limit or max(last) < level - limit:
        return statistics.median(last) - level
    return 0.0
