"""Runs of the variants of the policy losses, and their formulas over the rows that reached the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from areno.types import TrainSequence
from tests.helpers.policy_runs import Played, play, trained

Variant = Callable[..., Played]
MOVING = ["actor.ppo_n_minibatches=8", "actor.optimizer.lr=1e-2", "total_train_steps=1"]  # ratios leave 1


def player(recipe: str, folder: Path, reward_model: Path, *settings: str) -> Variant:
    count = iter(range(100))

    def run_variant(*overrides: str, **given: Any) -> Played:
        own = [] if any(text.startswith("reward.") for text in overrides) else ["reward.fn=null"]
        own += [f"reward.path={reward_model}"] if own else []
        return play(recipe, folder / f"{recipe}{next(count)}", *own, *settings, *overrides, **given)

    return run_variant


def rewards(rows: Sequence[TrainSequence]) -> list[float]:
    return [row.reward for row in rows]


def advantages(rows: Sequence[TrainSequence]) -> list[float]:
    """One for each row, which all its tokens have."""
    found = [trained(row, "advantages") for row in rows]
    assert all(len(set(row)) == 1 for row in found)
    return [row[0] for row in found]


def reduced(
    rows: Sequence[TrainSequence], values: Sequence[Sequence[float]], reduction: str, longest: int = 8
) -> float:
    """Token values as one number."""
    counts = [len(row) for row in values]
    assert counts == [len(trained(row, "advantages")) for row in rows]
    if reduction == "token_mean":
        return sum(map(sum, values)) / sum(counts)
    if reduction == "seq_mean_token_mean":
        return sum(sum(row) / n for row, n in zip(values, counts, strict=True)) / len(rows)
    return sum(map(sum, values)) / longest / len(rows)


def on_policy_loss(rows: Sequence[TrainSequence], reduction: str) -> float:
    return -reduced(rows, [trained(row, "advantages") for row in rows], reduction)


def close(expected: Any, within: float = 1e-5) -> Any:
    return pytest.approx(expected, abs=within, rel=1e-4)
