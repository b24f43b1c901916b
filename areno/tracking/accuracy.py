"""Metrics that count a reward of at least 1 as a right answer: accuracy, pass@k and avg@n.

If the score of a model is part of the reward, or a reward exceeds 1, they have no meaning and are not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

RIGHT = 1.0 - 1e-6  # the least reward of a right answer
_MOST = 1.0 + 1e-6


def exceed_one(rewards: Iterable[float]) -> bool:
    return any(reward > _MOST for reward in rewards)


def counts_right(name: str) -> bool:
    space, _, last = name.rpartition("/")
    return not space.startswith("train") and (last == "accuracy" or last.startswith(("pass@", "avg@")))


def without_right(metrics: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in metrics.items() if not counts_right(name)}
