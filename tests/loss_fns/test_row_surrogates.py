"""Surrogates that couple the tokens of a row, against their papers' formulas as plain loops in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from areno.errors import ConfigError
from areno.launch.compose import load
from areno.loss_fns import grpo_loss_fn
from areno.loss_fns.surrogates import FIPO, GMPO, VESPO
from areno.recipes.grpo import GRPOConfig
from areno.recipes.ppo import PPOConfig
from tests.helpers.loss_rows import PRECISIONS, all_trained, check, pack_of, random_rows, token_weight, trained

Tokens = list[tuple[float, float, float]]  # (log p, log r, A)


def gmpo(tokens: Tokens, clip: float = 0.4):
    """(value, derivative by log p) of each token. The product of the paper, and its derivative with respect to log p_t
    times T, which the mean over the T tokens divides by T again.
    """
    product = 1.0
    for _, log_r, a in tokens:
        if a > 0:
            product *= min(math.exp(log_r), math.exp(clip))
        elif a < 0:
            product *= max(math.exp(log_r), math.exp(-clip))
    mean = product ** (1 / len(tokens))
    return [(-a * mean, -a * mean * (log_r <= clip if a > 0 else log_r >= -clip)) for _, log_r, a in tokens]


def vespo(tokens: Tokens, pos=(2.0, 3.0), neg=(3.0, 2.0)):
    w = math.exp(sum(log_r for _, log_r, _ in tokens))
    found = []
    for lp, _, a in tokens:
        k, rate = pos if a >= 0 else neg
        phi = w**k * math.exp(rate * (1 - w))
        found.append((-phi * a * lp, -phi * a))
    return found


def fipo(tokens: Tokens, low=1.0, high=1.2, half_life=32.0, cap=10.0, c=10.0, eps=0.2):
    gamma, found = 2 ** (-1 / half_life), []
    for t, (_, log_r, a) in enumerate(tokens):
        future = sum(gamma ** (k - t) * tokens[k][1] for k in range(t, len(tokens)) if math.exp(tokens[k][1]) <= c)
        weight, r = min(max(math.exp(future), low), high), math.exp(log_r)
        if a < 0 and r > cap:
            weight = min(weight, 1.0)
        clipped = min(max(r, 1 - eps), 1 + eps)
        value, slope = -min(r * a, clipped * a), (-a * r if r * a <= clipped * a else 0.0)
        if a < 0 and value > -c * a:
            value, slope = -c * a, 0.0
        found.append((weight * value, weight * slope))
    return found


def by_hand(rows, formula, reduction="seq_mean_token_mean", weighted=False):
    loss, grads = 0.0, []
    for row in rows:
        grad, at = [0.0] * len(row["mask"]), trained(row)
        tokens = [(row["outputs"][t], row["outputs"][t] - row["old_logprobs"][t], row["advantages"][t]) for t in at]
        for t, (value, slope) in zip(at, formula(tokens) if at else [], strict=True):
            share = token_weight(rows, row, reduction, 10) * (row["weights"][t] if weighted else 1.0)
            loss, grad[t] = loss + share * value, share * slope
        grads += grad
    return loss, grads


CASES = {
    "gmpo": ("gmpo", gmpo),
    "gmpo, narrow": (GMPO(log_clip=0.1), partial(gmpo, clip=0.1)),
    "vespo": ("vespo", vespo),
    "vespo, other": (
        VESPO(k_pos=1.0, lambda_pos=0.5, k_neg=0.5, lambda_neg=1.5),
        partial(vespo, pos=(1.0, 0.5), neg=(0.5, 1.5)),
    ),
    "fipo": ("fipo", fipo),
    "fipo, both sides": (FIPO(weight_low=0.8, half_life=2.0), partial(fipo, low=0.8, half_life=2.0)),
    "fipo, caps": (FIPO(cap_ratio=1.05, c_clip=1.3), partial(fipo, cap=1.05, c=1.3)),
}


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("weighted", [False, True])
def test_row_surrogates(case, dtype, tol, reduction, weighted):
    surrogate, formula = CASES[case]
    for seed in range(4):
        rows = random_rows(seed, constant_advantage=seed % 2 == 0, spread=0.6)
        loss_fn = partial(grpo_loss_fn, surrogate=surrogate, reduction=reduction, norm_length=10)
        stats = check(loss_fn, rows, by_hand(rows, formula, reduction, weighted), dtype, tol, weighted)
        assert stats["ratio"].shape == (len(all_trained(rows, "outputs")),)


@pytest.mark.parametrize("surrogate", ["gmpo", "vespo", "fipo"])
def test_fresh_samples_have_the_gradient_of_grpo(surrogate):
    """With one update of a batch the ratios are 1; to the bit."""
    rows = random_rows(spread=0.0)
    (pack, one), (_, other) = pack_of(rows), pack_of(rows)
    grpo_loss_fn(pack, one, kl_coef=0.1)[0].backward()
    grpo_loss_fn(pack, other, surrogate=surrogate, kl_coef=0.1)[0].backward()
    assert torch.equal(one.grad, other.grad)


def test_gmpo_of_a_row_is_the_papers_product():
    """With one advantage in each row, the loss is the mean over rows of -A times the geometric mean."""
    rows = random_rows(3, constant_advantage=True)
    loss, stats = grpo_loss_fn(*pack_of(rows), surrogate="gmpo")
    expected = []
    for row in filter(trained, rows):
        a, product = row["advantages"][0], 1.0
        for t in trained(row):
            r = math.exp(row["outputs"][t] - row["old_logprobs"][t])
            product *= min(r * a, min(max(r, math.exp(-0.4)), math.exp(0.4)) * a) / a  # as in the paper's eq. 4
        expected.append(-a * product ** (1 / len(trained(row))))
    assert loss.item() == pytest.approx(sum(expected) / len(expected), abs=1e-12)
    assert stats["clip_frac"] > 0


def test_extreme_rows_stay_finite():
    for spread in (30.0, 300.0):
        for surrogate in ("gmpo", "vespo", "fipo"):
            rows = random_rows(spread=spread)
            pack, outputs = pack_of(rows, dtype=torch.float32)
            loss, _ = grpo_loss_fn(pack, outputs, surrogate=surrogate)
            loss.backward()
            assert loss.isfinite()
            assert outputs.grad.isfinite().all()


def test_micro_batches_have_the_loss_of_the_whole():
    rows = random_rows(5)
    n_rows, n_tokens = sum(any(row["mask"]) for row in rows), len(all_trained(rows, "outputs"))
    for surrogate in ("gmpo", "vespo", "fipo"):
        sums = []
        for parts in ([rows], [rows[:2], rows[2:3], rows[3:]]):
            packs = [pack_of(part, step_rows=n_rows, step_tokens=n_tokens) for part in parts]
            sums.append(sum(grpo_loss_fn(*pack, surrogate=surrogate)[0].item() for pack in packs))
        assert sums[1] == pytest.approx(sums[0], abs=1e-12)


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match="needs ratios of tokens"):
        grpo_loss_fn(*pack_of(random_rows()), surrogate="gmpo", importance_sampling_level="sequence")
    for recipe, default in ((GRPOConfig, "quickstart"), (PPOConfig, "quickstart_ppo")):
        with pytest.raises(ConfigError, match=r"actor\.importance_sampling_level: is sequence, but surrogate=vespo"):
            load(recipe, default, ["actor.surrogate=vespo", "actor.importance_sampling_level=sequence"])
        with pytest.raises(ConfigError, match=r"actor\.gmpo\.log_clip: is 0\.1, but actor\.surrogate is fipo"):
            load(recipe, default, ["actor.surrogate=fipo", "actor.gmpo.log_clip=0.1"])
        with pytest.raises(ConfigError, match=r"actor\.eps_clip: is 0\.3, but actor\.surrogate is fipo"):
            load(recipe, default, ["actor.surrogate=fipo", "actor.eps_clip=0.3"])
        assert load(recipe, default, ["actor.surrogate=fipo", "actor.fipo.eps_clip=0.3"]).actor.clip_range() == 0.3
