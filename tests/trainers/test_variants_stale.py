"""Variants that correct rows of another policy, run for a step or two: what only each does, in numbers.

`stale` gives the rows another policy's log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.trainers import off_policy_correction, update
from areno.types import TrainSequence
from tests.helpers.policy_runs import trained
from tests.helpers.variant_runs import Variant, advantages, close, player, reduced


@pytest.fixture
def ppo(tmp_path: Path, models: dict[str, Path]) -> Variant:
    return partial(player("ppo", tmp_path, models["reward"], "critic.warmup_steps=0"), task="quickstart_ppo")


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come with log-probabilities of a policy two steps old: the sampling one's with noise."""
    rows_of, draw = update.policy_rows, np.random.default_rng(0)

    def policy_rows(*args: Any, **how: Any) -> list[TrainSequence]:
        rows = rows_of(*args, **how)
        for row in rows:
            assert row.logprobs is not None
            assert row.prompt_mask is not None
            noise = draw.normal(0.0, 0.3, len(row.logprobs))
            row.logprobs = [
                0.0 if masked else old + more
                for old, more, masked in zip(row.logprobs, noise.tolist(), row.prompt_mask, strict=True)
            ]
            row.staleness = 2
        return rows

    monkeypatch.setattr(update, "policy_rows", policy_rows)


WIDE = ["actor.eps_clip=1.0", "actor.eps_clip_higher=1e6"]  # the bare ratio


def spied(rows_of: list[list[np.ndarray]]) -> Any:
    """Keeps (behaviour, proximal) log-probabilities of the trained tokens at the moment of correction."""
    correct = off_policy_correction.correct_rows

    def correct_rows(rows: Sequence[TrainSequence], prox: Sequence[Sequence[float]], actor: Any) -> dict[str, float]:
        for row, new in zip(rows, prox, strict=True):
            places = ~np.array(row.prompt_mask)
            rows_of.append([np.array(row.logprobs)[places], np.array(new)[places]])
        return correct(rows, prox, actor)

    return correct_rows


@pytest.fixture
def before(stale: None, monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """[behaviour, proximal] of each row of one step, for runs of one step."""
    found: list[list[np.ndarray]] = []
    monkeypatch.setattr(off_policy_correction, "correct_rows", spied(found))
    return found


def test_ratios_are_to_training_before_the_update_unless_the_rollout_is_asked_for(grpo: Variant, stale: None) -> None:
    run, rollout = grpo("total_train_steps=1"), grpo("total_train_steps=1", "actor.recompute_logprob=false")
    assert (run.series("train/ratio_std"), run.series("train/clip_frac")) == ([0.0], [0.0])
    assert rollout.series("train/ratio_std")[0] > 0.1
    assert rollout.series("train/clip_frac")[0] > 0.1
    for each in (run, rollout):  # the difference to the rollout is logged either way
        assert each.series("train/logp_abs_diff_mean")[0] == close(0.3 * math.sqrt(2 / math.pi), 0.05)
    assert "time/recompute" not in run.names(), "the first update needs no pass of its own"


def test_decoupled_loss_weighs_by_the_distance_to_the_sampling_policy(grpo: Variant, before: list[Any]) -> None:
    run = grpo("variant=decoupled", "actor.reduction=token_mean", "total_train_steps=1")
    expected = [np.exp(prox - behave) for behave, prox in before]
    weights = [trained(row, "weights") for row in run.rows[0]]
    assert np.concatenate(weights) == close(np.concatenate(expected), 1e-4)
    assert run.series("train/weights_mean")[0] == close(np.concatenate(expected).mean(), 1e-4)
    assert run.series("train/ratio_std")[0] < 1e-5  # the ratio that is clipped is that to the proximal policy
    values = [
        [-w * a for w, a in zip(trained(row, "weights"), trained(row, "advantages"), strict=True)]
        for row in run.rows[0]
    ]
    assert run.series("train/policy_loss")[0] == close(reduced(run.rows[0], values, "token_mean"))
    assert run.series("train/rejected_frac") == [0]


@pytest.mark.slow
def test_decoupled_loss_without_a_forward_pass(grpo: Variant, stale: None) -> None:
    """The first update knows the proximal policy. In the second, 2/3 of the log-ratio is weight and 1/3 is ratio."""
    settings = ["variant=decoupled", "total_train_steps=1", *WIDE]
    run = grpo(*settings, "actor.prox_logp_method=loglinear")
    assert "time/recompute" not in run.names()
    assert run.series("train/ratio_std") == [0.0]
    assert run.series("train/weights_std")[0] == close(0.3, 0.06)
    halves = ["actor.ppo_n_minibatches=2", "actor.optimizer.lr=1e-12"]
    run = grpo(*settings, *halves, "actor.prox_logp_method=loglinear")
    assert run.series("train/ratio_std")[0] == close((0.0 + 0.1) / 2, 0.02)
    assert run.series("train/weights_std")[0] == close((0.3 + 0.2) / 2, 0.06)
    recomputed = grpo(*settings, "actor.prox_logp_method=metrics")
    # The interpolation is off by a third of the noise; the loss is that of recompute.
    error = recomputed.series("train/prox_approx_abs_diff_mean")[0]
    assert error == close(0.3 * math.sqrt(2 / math.pi) / 3, 0.02)
    assert "train/prox_approx_abs_diff_mean" not in run.names()
    assert recomputed.series("train/ratio_std")[0] < 1e-5


def test_decoupled_gspo_weighs_the_row(gspo: Variant, before: list[Any]) -> None:
    run = gspo("variant=decoupled", "total_train_steps=1")
    weights = [np.exp(prox - behave).mean() for behave, prox in before]
    assert run.series("train/weights_mean")[0] == close(np.mean(weights), 1e-4)
    assert run.series("train/policy_loss")[0] == close(
        -np.mean([w * a for w, a in zip(weights, advantages(run.rows[0]), strict=True)]), 1e-4
    )


def test_truncated_importance_sampling(grpo: Variant, before: list[Any]) -> None:
    run = grpo("variant=tis", "actor.rejection_sampling.upper=1.2", "total_train_steps=1")
    expected = np.concatenate([np.minimum(np.exp(prox - behave), 1.2) for behave, prox in before])
    assert 0 < (expected == 1.2).sum() < expected.size
    assert run.series("train/weights_max")[0] == close(1.2)
    assert run.series("train/weights_mean")[0] == close(expected.mean(), 1e-4)
    assert run.series("train/rejected_frac") == [0]


@pytest.mark.parametrize("metric", ["ratio", "kl_k2"])
def test_tokens_too_far_off_are_masked(grpo: Variant, before: list[Any], metric: str) -> None:
    bound = {"ratio": ["upper=1.3", "lower=0.8"], "kl_k2": ["upper=0.05", "metric=kl_k2"]}[metric]
    mask = ["+actor.rejection_sampling.action=mask", *(f"+actor.rejection_sampling.{text}" for text in bound)]
    run = grpo("actor.use_decoupled_loss=true", *mask, "total_train_steps=1")
    logs = [prox - behave for behave, prox in before]
    passed = [(np.exp(log) <= 1.3) & (np.exp(log) >= 0.8) if metric == "ratio" else log**2 / 2 <= 0.05 for log in logs]
    share = np.concatenate(passed).mean()
    assert 0.1 < share < 0.95
    assert run.series("train/rejected_frac")[0] == close(1 - share)
    for row, log, kept in zip(run.rows[0], logs, passed, strict=True):
        assert trained(row, "weights") == close(np.exp(log[kept]), 1e-4)
    assert run.series("train/response_len")[0] == close(np.mean([kept.sum() for kept in passed if kept.any()]), 1e-4)


def test_rows_too_far_off_are_masked(grpo: Variant, before: list[Any]) -> None:
    level = ["level=sequence", "action=mask", "upper=1.1", "lower=0.9"]
    run = grpo(
        "actor.use_decoupled_loss=true", *(f"+actor.rejection_sampling.{text}" for text in level), "total_train_steps=1"
    )
    means = [float(np.exp((prox - behave).mean())) for behave, prox in before]
    kept = [0.9 <= mean <= 1.1 for mean in means]
    assert 0 < sum(kept) < len(kept)
    for row, is_kept, mean in zip(run.rows[0], kept, means, strict=True):
        weights = trained(row, "weights")
        assert (len(weights) > 0) == is_kept
        assert weights == close([mean] * len(weights), 1e-4)


@pytest.mark.parametrize("recipe", ["grpo", "gspo"])
def test_m2po_masks_the_farthest_tokens(request: pytest.FixtureRequest, before: list[Any], recipe: str) -> None:
    settings = {"grpo": ["variant=m2po"], "gspo": WIDE}[recipe]
    run = request.getfixturevalue(recipe)(*settings, "actor.m2_threshold=0.02", "total_train_steps=1")
    log_r = np.concatenate([prox - behave for behave, prox in before])
    a = np.concatenate([trained(row, "advantages") for row in run.rows[0]])
    candidates = sorted(np.flatnonzero(log_r * a > 0), key=lambda t: log_r[t] ** 2)
    left = list(candidates)
    while left and np.mean([log_r[t] ** 2 for t in left]) > 0.02:
        left.pop()
    masked = sorted(set(candidates) - set(left))
    assert 0 < len(masked) < len(candidates)
    assert run.series("train/m2_masked_frac")[0] == close(len(masked) / len(log_r))
    weights = np.concatenate([trained(row, "weights") for row in run.rows[0]])
    assert np.flatnonzero(weights == 0).tolist() == masked
    assert weights[weights > 0] == close(np.exp(log_r[weights > 0]), 1e-4)  # the rest of the paper's ratio
    assert run.series("train/response_len")[0] == close(len(log_r) / 16)  # they keep their place in the mean
    assert run.series("train/ratio_std") == [0.0]


@pytest.mark.slow
def test_on_policy_rows_have_nothing_to_correct(grpo: Variant) -> None:
    plain = grpo()
    run = grpo("actor.use_decoupled_loss=true", "actor.m2_threshold=0.04", "+actor.rejection_sampling.action=mask")
    assert run.series("train/m2_masked_frac") == run.series("train/rejected_frac") == [0, 0]
    assert run.series("train/weights_mean") == close([1.0, 1.0], 1e-4)
    assert run.series("train/grad_norm") == close(plain.series("train/grad_norm"), 1e-3)
    assert run.series("train/loss") == close(plain.series("train/loss"), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["actor.use_cispo_loss=true", "actor.recompute_logprob=false"], "train/clip_frac_high"),
        (["variant=sapo"], "train/sapo_gate"),
        (["actor.importance_sampling_level=sequence", "actor.recompute_logprob=false"], "train/ratio_std"),
        (["actor.m2_threshold=0.02"], "train/m2_masked_frac"),
        (["actor.use_decoupled_loss=true", "actor.prox_logp_method=metrics"], "train/prox_approx_abs_diff_mean"),
        (["actor.use_decoupled_loss=true", "actor.prox_logp_method=loglinear"], "train/weights_std"),
        (["actor.use_decoupled_loss=true", "+actor.rejection_sampling.upper=1.2"], "train/rejected_frac"),
        (["actor.ppo_n_minibatches=4", "critic.ppo_n_minibatches=2"], "train/ratio_std"),
    ],
)
def test_variants_of_ppo(ppo: Variant, stale: None, settings: list[str], name: str) -> None:
    run = ppo(*settings)
    assert len(run.rows) == len(run.critic_rows) == 2
    assert run.series(name)[0] > 0
    assert all(norm > 0 for norm in run.series("train/grad_norm"))
    assert run.series("train/skipped_steps") == run.series("train/critic_skipped_steps") == [0, 0]
