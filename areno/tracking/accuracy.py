"""Metrics that count a reward of at least 1 as a right answer: accuracy, pass@k and avg@n.

If the score of a model is part of the reward, or a reward exceeds 1, they have no meaning and are not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

RIGHT = 1.0 - 1e-6  # the least reward of a right answer
_MOST = 1.0 + 1e-6


def has_reward_above_one(rewards: Iterable[float]) -> bool:
    return any(reward > _MOST for reward in rewards)


def is_accuracy_metric(name: str) -> bool:
    space, _, last = name.rpartition("/")
    return not space.startswith("train") and (last == "accuracy" or last.startswith(("pass@", "avg@")))


def without_accuracy_metrics(metrics: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in metrics.items() if not is_accuracy_metric(name)}
