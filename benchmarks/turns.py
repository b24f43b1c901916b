"""Time several ways to do the same work in turn, so that a change of the device's speed affects all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areno.bench.timing import log_progress, repeat_name

Way = Callable[[int], Callable[[], Any]]
"""A function of the number of a repeat (-1: warm-up). It prepares the repeat, and returns the function to time."""


def time_interleaved(ways: Mapping[str, Way], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of all repeats of each way after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-1, repeats):
        for name, way in ways.items():
            body = way(repeat)
            started = time.perf_counter()
            body()
            taken = time.perf_counter() - started
            log_progress(f"{name}, {repeat_name(repeat, repeats)}: {taken:.3f} s")
            if repeat >= 0:
                seconds[name].append(taken)
        if repeat < 0:
            gc.freeze()  # as runs do; otherwise a garbage collection scans all imported modules for 0.1 s
    return seconds


def speeds(n_tokens: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Summarize several ways to sample the same tokens. `relative` is the speed divided by that of the first way."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = next(iter(medians.values()))
    return {
        name: {
            "rollout_s": median,
            "fastest_s": min(seconds[name]),
            "slowest_s": max(seconds[name]),
            "tok_s": n_tokens / median,
            "relative": first / median,
        }
        for name, median in medians.items()
    }
