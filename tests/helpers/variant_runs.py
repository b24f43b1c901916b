"""Runs of the variants of the policy losses, and their formulas over the rows that reached the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from areno.types import TrainSequence
from tests.helpers.policy_runs import Played, play, trained

Variant = Callable[..., Played]
# Each with what makes it act in the runs below.
SOLVED = ["train_dataset.loader=examples/quickstart/dataset_loader.py:with_responses"]
VARIANTS = {
    "rlsd": SOLVED,
    "sdar": SOLVED,
    "clip_cov": ["actor.clip_cov.share=0.1", "actor.clip_cov.low=0.1"],
    "kl_cov": ["actor.kl_cov.share=0.2"],
    "top_entropy": [],
    "entropy_bonus": ["actor.entropy_bonus.coef=3.0"],
    "fipo": [],
    "real": [],
    "otb": [],
    "gmpo": ["actor.gmpo.log_clip=0.01"],
    "vespo": [],
    "dppo_tv": ["actor.dppo_tv.threshold=0.02"],
    "dppo_kl": ["actor.dppo_kl.threshold=0.001"],
    "dppo_topk_tv": ["actor.dppo_topk_tv.threshold=0.05", "actor.dppo_topk_tv.top_k=4"],
    "dppo_topk_kl": ["actor.dppo_topk_kl.threshold=0.01", "actor.dppo_topk_kl.top_k=1"],
    "prime_ipo": ["actor.prime_ipo.threshold=0.02"],
    "sao_mask": ["actor.sao.eps_low=0.1", "actor.sao.eps_high=0.1"],
}
# These differ in ways that most of the others have, too, so they run less often.
ALSO: dict[str, list[str]] = {
    "adaptive_entropy": ["actor.entropy_bonus.coef=3.0", "actor.entropy_bonus.target=9.0"],
    "cispo": ["actor.eps_clip_higher=0.01"],
    "dapo": ["rollout.dynamic_sampling=false", "actor.eps_clip=0.02", "actor.eps_clip_higher=0.05"],
    "decoupled": [],
    "dr_grpo": [],
    "gdpo": ["reward.fn=[math,examples/quickstart/reward.py]", "reward.workers=1"],
    "gspo_token": ["actor.eps_clip=0.02"],
    "icepop": [],
    "iw_opd": ["teacher.path=OTHER", "actor.optimizer.lr=1e-3"],
    "kpop": [],
    "luspo": ["actor.eps_clip=0.02"],
    "m2po": [],
    "maxrl": ["actor.reward_bias=10.0"],
    "reinforce_pp": ["actor.kl_ctl=0.1"],
    "rloo": [],
    "sao": ["critic.warmup_steps=0", "gconfig.n_samples=1", "train_dataset.batch_size=16", "actor.sao.eps_low=0.1"],
    "sapo": [],
    "sdpg": SOLVED,
    "tis": [],
}
RECIPES = {"sao": "ppo", "iw_opd": "distill"}
# One update before the one that is compared: rounding errors of many would decide which tokens are masked.
MOVED = ["actor.ppo_n_minibatches=2", "actor.optimizer.lr=1e-2", "total_train_steps=1"]
# Statistics of which each variant has one, above 0.
OWN = {
    f"train/{name}" for name in ("clip_frac", "masked_frac", "selected_frac", "vespo_weight", "fipo_weight", "entropy")
}

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
