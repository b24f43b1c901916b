"""Variants that differ in the ratio and how it is clipped, and the KL to a reference, run for a step or two."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.loss_fns import grpo_loss_fn
from tests.helpers.policy_runs import groups, trained
from tests.helpers.variant_runs import MOVING, Variant, advantages, close, reduced


def test_later_minibatches_see_true_ratios(grpo: Variant) -> None:
    """The first update of a batch has the ratio 1 everywhere, later ones the ratio to the policy before the first."""
    seen: list[torch.Tensor] = []

    def loss_fn(pack: Any, logprobs: torch.Tensor) -> Any:
        loss, stats = grpo_loss_fn(pack, logprobs)
        seen.append(stats["ratio"])
        return loss, stats

    run = grpo("actor.ppo_n_minibatches=4", "total_train_steps=1", loss_fn=loss_fn)
    assert len(seen) == 4
    assert sum(map(len, seen)) == sum(len(trained(row, "logprobs")) for row in run.rows[0])
    assert (seen[0] == 1).all()
    assert all(ratios.std() > 1e-3 for ratios in seen[1:])
    assert run.series("train/ratio_std")[0] > 1e-3
    assert run.series("train/logp_abs_diff_max")[0] < 1e-4  # rollout against training, before any update


@pytest.mark.slow
def test_gspo_token_is_gspo_where_the_tokens_of_a_row_have_one_advantage(grpo: Variant, gspo: Variant) -> None:
    two = ["actor.ppo_n_minibatches=2", "actor.eps_clip=0.05"]
    sequence, token = gspo(*two), grpo(*two, "variant=gspo_token")
    plain = grpo(*two)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "rollout/rewards_mean", "train/approx_kl"):
        assert token.series(name) == close(sequence.series(name)), name
    assert plain.series("train/grad_norm")[0] != close(sequence.series("train/grad_norm")[0], 1e-3)
    # A geometric mean over the row moves less than its tokens do.
    assert sequence.series("train/ratio_std")[0] < plain.series("train/ratio_std")[0]


@pytest.mark.slow
def test_cispo(grpo: Variant) -> None:
    run = grpo("variant=cispo")
    for step, rows in enumerate(run.rows):
        values = [
            [-a * p for a, p in zip(trained(row, "advantages"), trained(row, "logprobs"), strict=True)] for row in rows
        ]
        assert run.series("train/policy_loss")[step] == close(reduced(rows, values, "token_mean"))
    moved = grpo("variant=cispo", *MOVING)
    assert moved.series("train/clip_frac_low") == [0]  # nothing is below 1 - 1
    assert moved.series("train/clip_frac_high")[0] > 0
    # The clip cuts the weight of a gradient and leaves the gradient: another update than PPO's clip makes.
    other = grpo("variant=cispo", *MOVING, "actor.surrogate=clip")
    assert moved.series("train/grad_norm")[0] != close(other.series("train/grad_norm")[0], 1e-3)


@pytest.mark.slow
def test_sapo(grpo: Variant) -> None:
    run, moved = grpo("variant=sapo"), grpo("variant=sapo", *MOVING)
    assert run.series("train/sapo_gate") == close([1.0, 1.0])
    assert 0.3 < moved.series("train/sapo_gate")[0] < 0.999
    assert not any("clip_frac" in name for name in moved.names())
    # At the ratio 1, f = 2 / tau: the loss is that of GRPO with another factor for each sign.
    values = [[-a * 2 / (1.0 if a > 0 else 1.05) for a in trained(row, "advantages")] for row in run.rows[0]]
    assert run.series("train/policy_loss")[0] == close(reduced(run.rows[0], values, "seq_mean_token_mean"))
    # A larger tau closes the gate faster.
    sharp = grpo("variant=sapo", *MOVING, "actor.sapo_tau_pos=5", "actor.sapo_tau_neg=5")
    assert sharp.series("train/sapo_gate")[0] < moved.series("train/sapo_gate")[0]


def test_dual_clip(grpo: Variant) -> None:
    runs = [grpo(*MOVING, f"actor.c_clip={bound}") for bound in (1.05, 100.0)]
    assert runs[0].series("train/clip_frac_dual")[0] > 0
    assert runs[1].series("train/clip_frac_dual") == [0]


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", lambda x: -x),
        ("k2", lambda x: x * x / 2),
        ("k3", lambda x: math.exp(x) - x - 1),
    ],
)
def test_kl_to_the_reference(
    grpo: Variant, models: dict[str, Path], estimator: str, formula: Callable[[float], float]
) -> None:
    run = grpo(f"+ref.path={models['lm']}", "actor.kl_ctl=0.7", f"actor.kl_estimator={estimator}")
    for step, rows in enumerate(run.rows):
        values = [
            [
                formula(ref - new)
                for new, ref in zip(trained(row, "logprobs"), trained(row, "ref_logprobs"), strict=True)
            ]
            for row in rows
        ]
        expected = reduced(rows, values, "seq_mean_token_mean")
        assert expected > 1e-3 or estimator == "k1"
        kl, policy = run.series("train/kl_loss")[step], run.series("train/policy_loss")[step]
        assert kl == close(expected, 1e-4)
        assert run.series("train/loss")[step] == close(policy + 0.7 * kl)


def test_the_reference_is_the_actor_as_it_starts(grpo: Variant) -> None:
    run = grpo("ref=default", "actor.kl_ctl=0.1", "total_train_steps=3", "actor.optimizer.lr=5e-3")
    kl = run.series("train/kl_loss")
    assert abs(kl[0]) < 1e-8
    assert kl[2] > 1e-4


def test_kl_in_the_reward_of_a_group(grpo: Variant, models: dict[str, Path]) -> None:
    """What the tokens of a row earn in all is compared within the group; the loss has no KL."""
    run = grpo(
        f"+ref.path={models['lm']}",
        "actor.kl_ctl=0.5",
        "actor.use_kl_in_reward=true",
        "actor.kl_estimator=k1",
        "actor.adv_norm.std_level=null",
        "actor.adv_norm.mean_leave1out=true",
    )
    assert "train/kl_loss" not in run.names()
    for rows in run.rows:
        for group in groups(rows):
            earned = [
                row.reward - 0.5 * (sum(trained(row, "logprobs")) - sum(trained(row, "ref_logprobs"))) for row in group
            ]
            assert advantages(group) == close([x - (sum(earned) - x) / 3 for x in earned], 1e-4)


def test_an_entropy_bonus_raises_the_entropy(grpo: Variant) -> None:
    plain, bonus = (grpo(*MOVING, f"actor.entropy_bonus={value}") for value in ("null", "{coef: 1.0}"))
    assert bonus.series("train/entropy")[0] > plain.series("train/entropy")[0] + 0.05


def test_an_adapted_entropy_bonus(grpo: Variant) -> None:
    run = grpo("variant=adaptive_entropy", "actor.entropy_bonus.target=9.0", "total_train_steps=3")
    assert run.series("train/entropy_coef") == close([0.0, 0.005, 0.01])
