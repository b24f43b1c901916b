"""Each policy loss against its paper's formula written as plain loops in float64: values and gradients."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from areno.errors import DataError
from areno.loss_fns import grpo_loss_fn, gspo_loss_fn, ppo_loss_fn, sft_loss_fn
from tests.helpers.loss_rows import PRECISIONS, all_trained, check, pack_of, random_rows, token_weight, trained


def clip(ratio, a, low, high, c=None):
    """The value, and its derivative with respect to the ratio."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    value, slope = -min(ratio * a, clipped * a), (-a if ratio * a <= clipped * a else 0.0)
    if c is not None and a < 0 and value > -c * a:
        value, slope = -c * a, 0.0
    return value, slope


def kl_by_hand(estimator, lp, ref):
    """The value, and its derivative with respect to lp."""
    if estimator == "k1":
        return lp - ref, 1.0
    if estimator == "k2":
        return (lp - ref) ** 2 / 2, lp - ref
    return math.exp(ref - lp) - (ref - lp) - 1, 1 - math.exp(ref - lp)


def tokens_by_hand(row, weighted, prox_logp_method):
    """{t: (log ratio to the proximal policy, factor on the policy term)}"""
    out = {}
    for t in trained(row):
        old, lp = row["old_logprobs"][t], row["outputs"][t]
        prox = old
        if prox_logp_method == "loglinear":
            prox = old + row["staleness"] / (row["staleness"] + 1) * (lp - old)
        out[t] = (lp - prox, math.exp(prox - old) * (row["weights"][t] if weighted else 1.0))
    return out


def policy_by_hand(
    rows,
    low=0.2,
    high=0.2,
    c=None,
    reduction="seq_mean_token_mean",
    norm_length=10,
    kl_coef=0.0,
    kl_estimator="k3",
    level="token",
    surrogate="clip",
    weighted=False,
    prox_logp_method="recompute",
    taus=(1.0, 1.05),
):
    loss, grads = 0.0, []
    for row in rows:
        grad, tokens = [0.0] * len(row["mask"]), tokens_by_hand(row, weighted, prox_logp_method)
        for t, (log_ratio, factor) in tokens.items():
            share = token_weight(rows, row, reduction, norm_length)
            lp, a = row["outputs"][t], row["advantages"][t]
            if level == "sequence":
                log_ratio = sum(lr for lr, _ in tokens.values()) / len(tokens)
            ratio = math.exp(log_ratio)
            if surrogate == "clip":
                value, slope = clip(ratio, a, low, high, c)
                slope *= ratio  # the token's own log-probability moves its ratio by this, at either level
            elif surrogate == "cispo":
                weight = min(max(ratio, 1 - low), 1 + high)
                value, slope = -weight * a * lp, -weight * a
            else:
                tau = taus[0] if a > 0 else taus[1]
                soft = 1 / (1 + math.exp(-tau * (ratio - 1)))
                value, slope = -4 / tau * soft * a, -4 * soft * (1 - soft) * a * ratio
            kl, kl_slope = kl_by_hand(kl_estimator, lp, row["ref_logprobs"][t])
            loss += share * (factor * value + kl_coef * kl)
            grad[t] = share * (factor * slope + kl_coef * kl_slope)
        grads += grad
    return loss, grads


def gspo_by_hand(rows, low=3e-4, high=3e-4, c=None, kl_coef=0.0, weighted=False):
    loss, grads = 0.0, []
    n_rows = sum(any(r["mask"]) for r in rows)
    for row in rows:
        grad, tokens = [0.0] * len(row["mask"]), tokens_by_hand(row, weighted, "recompute")
        if tokens:
            s = math.exp(sum(log_ratio for log_ratio, _ in tokens.values()) / len(tokens))
            factor = sum(f for _, f in tokens.values()) / len(tokens)
            value, slope = clip(s, row["advantages"][0], low, high, c)
            loss += factor * value / n_rows
            for t in tokens:
                kl, kl_slope = kl_by_hand("k3", row["outputs"][t], row["ref_logprobs"][t])
                loss += kl_coef * kl / len(tokens) / n_rows
                grad[t] = (factor * slope * s + kl_coef * kl_slope) / len(tokens) / n_rows
        grads += grad
    return loss, grads


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
def test_sft(dtype, tol):
    rows = random_rows()
    n = len(all_trained(rows, "outputs"))
    expected = -sum(all_trained(rows, "outputs")) / n, [-m / n for row in rows for m in row["mask"]]
    stats = check(sft_loss_fn, rows, expected, dtype, tol)
    assert stats["entropy"].item() == pytest.approx(sum(all_trained(rows, "entropy")) / n)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize(("high", "c", "kl_coef"), list(itertools.product([None, 0.5], [None, 1.3], [0.0, 0.07])))
def test_grpo(dtype, tol, reduction, high, c, kl_coef):
    rows = random_rows()
    how = {"c_clip": c, "reduction": reduction, "norm_length": 10, "kl_coef": kl_coef}
    expected = policy_by_hand(rows, 0.2, high or 0.2, c, reduction, 10, kl_coef)
    stats = check(partial(grpo_loss_fn, clip_eps_higher=high, **how), rows, expected, dtype, tol)

    olds = all_trained(rows, "old_logprobs")
    ratios = [math.exp(lp - old) for lp, old in zip(all_trained(rows, "outputs"), olds, strict=True)]
    advantages, n = all_trained(rows, "advantages"), len(olds)
    torch.testing.assert_close(stats["ratio"], torch.tensor(ratios, dtype=dtype))
    low_cut = sum(r < 0.8 and a < 0 for r, a in zip(ratios, advantages, strict=True)) / n
    high_cut = sum(r > 1 + (high or 0.2) and a > 0 for r, a in zip(ratios, advantages, strict=True)) / n
    assert low_cut > 0
    assert high_cut > 0
    assert stats["clip_frac_low"].item() == pytest.approx(low_cut, rel=1e-5)
    assert stats["clip_frac"].item() == pytest.approx(low_cut + high_cut, rel=1e-5)
    assert stats["advantage_mean"].item() == pytest.approx(sum(advantages) / n, rel=1e-5)
    k3 = sum(r - 1 - math.log(r) for r in ratios) / n
    assert stats["approx_kl"].item() == pytest.approx(k3, rel=1e-4)
    assert ("kl_loss" in stats) == (kl_coef > 0)
    assert "weights" not in stats
    plain = policy_by_hand(rows, 0.2, high or 0.2, c, reduction, 10)[0]
    assert stats["policy_loss"].item() == pytest.approx(plain, abs=1e-5)
    if c is not None:
        assert stats["clip_frac_dual"].item() > 0


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("prox_logp_method", ["recompute", "loglinear"])
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
def test_ppo_and_its_variants(dtype, tol, surrogate, level, weighted, prox_logp_method, kl_estimator):
    """Every way to make the ratio with every surrogate; the KL is never weighted."""
    how = {"kl_estimator": kl_estimator, "surrogate": surrogate, "prox_logp_method": prox_logp_method}
    for seed in range(2):
        rows = random_rows(seed, spread=0.8)
        by_hand = partial(policy_by_hand, rows, 0.1, 0.3, 3.0, "token_mean", level=level, weighted=weighted, **how)
        loss_fn = partial(
            ppo_loss_fn,
            clip_eps=0.1,
            clip_eps_higher=0.3,
            importance_sampling_level=level,
            kl_coef=0.2,
            **how,
        )
        stats = check(loss_fn, rows, by_hand(kl_coef=0.2), dtype, tol, weighted)
        assert stats["policy_loss"].item() == pytest.approx(by_hand()[0], rel=1e-4, abs=1e-5)
        kl_loss = by_hand(kl_coef=1.0)[0] - by_hand()[0]
        assert stats["kl_loss"].item() == pytest.approx(kl_loss, rel=1e-4, abs=1e-5)
        assert ("clip_frac" in stats) == (surrogate != "sapo")
        assert ("weights" in stats) == (weighted or prox_logp_method == "loglinear")


def test_defaults_of_ppo_and_grpo():
    rows = random_rows(spread=3.0)  # far enough for the dual clip
    check(ppo_loss_fn, rows, policy_by_hand(rows, c=3.0, reduction="token_mean"), torch.float64, 1e-9)
    check(grpo_loss_fn, rows, policy_by_hand(rows), torch.float64, 1e-9)
    assert ppo_loss_fn(*pack_of(rows))[1]["clip_frac_dual"] > 0


def test_statistics_of_cispo_and_sapo():
    rows = random_rows()
    pairs = zip(all_trained(rows, "outputs"), all_trained(rows, "old_logprobs"), strict=True)
    ratios = [math.exp(lp - old) for lp, old in pairs]
    stats = grpo_loss_fn(*pack_of(rows), surrogate="cispo")[1]
    low, high = sum(r < 0.8 for r in ratios) / len(ratios), sum(r > 1.2 for r in ratios) / len(ratios)
    assert low * high > 0
    assert stats["clip_frac_low"].item() == pytest.approx(low)
    assert stats["clip_frac_high"].item() == pytest.approx(high)
    assert stats["clip_frac"].item() == pytest.approx(low + high)

    stats = grpo_loss_fn(*pack_of(rows), surrogate="sapo", sapo_tau_pos=2.0, sapo_tau_neg=3.0)[1]
    taus = [2.0 if a > 0 else 3.0 for a in all_trained(rows, "advantages")]
    # f'(r) of f(r) = 4 / tau sigmoid(tau (r - 1)), by the difference quotient
    f = [lambda r, tau=tau: 4 / tau / (1 + math.exp(-tau * (r - 1))) for tau in taus]
    slopes = [(g(r + 1e-5) - g(r - 1e-5)) / 2e-5 for g, r in zip(f, ratios, strict=True)]
    assert stats["sapo_gate"].item() == pytest.approx(sum(slopes) / len(slopes), rel=1e-6)


def test_a_cispo_weight_without_lower_bound():
    """clip_eps = 1 is the paper's setting: no weight is cut from below."""
    rows = random_rows(spread=2.0)
    stats = check(
        partial(grpo_loss_fn, surrogate="cispo", clip_eps=1.0, clip_eps_higher=0.2),
        rows,
        policy_by_hand(rows, low=1.0, high=0.2, surrogate="cispo"),
        torch.float64,
        1e-9,
    )
    assert stats["clip_frac_low"] == 0


def test_weights_are_reported_as_they_are():
    rows = random_rows()
    stats = grpo_loss_fn(*pack_of(rows, weighted=True))[1]
    assert stats["weights"].tolist() == all_trained(rows, "weights")
    stats = gspo_loss_fn(*pack_of(rows, weighted=True))[1]
    means = [sum(row["weights"][t] for t in trained(row)) / len(trained(row)) for row in rows if trained(row)]
    assert stats["weights"].tolist() == pytest.approx(means)


def test_a_row_that_is_not_stale_needs_no_proximal_policy():
    rows = [{**row, "staleness": 0} for row in random_rows()]
    plain, _ = grpo_loss_fn(*pack_of(rows))
    interpolated, _ = grpo_loss_fn(*pack_of(rows, interpolated=True), prox_logp_method="loglinear")
    assert interpolated.item() == plain.item()


def test_loglinear_takes_the_proximal_policy_where_it_is_known():
    """As in the first update of a batch, whose own log-probabilities are those of the policy before it."""
    rows = random_rows(spread=0.8)
    pack, outputs = pack_of(rows)
    rollout = torch.tensor([value - 0.3 for row in rows for value in row["old_logprobs"]], dtype=torch.float64)
    pack.rollout_logprobs = rollout
    loss, stats = grpo_loss_fn(pack, outputs, prox_logp_method="loglinear")
    pack.weights = torch.exp(pack.old_logprobs - rollout)
    expected, _ = grpo_loss_fn(pack, outputs)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(stats["weights"], torch.full_like(stats["weights"], math.exp(0.3)))


def test_gspo_token_with_equal_advantages_is_gspo():
    """arXiv 2507.18071 sec. 4.3: value, clip and gradient are the same."""
    rows = random_rows(constant_advantage=True)
    (pack, one), (_, other) = pack_of(rows), pack_of(rows)
    sequence, stats = gspo_loss_fn(pack, one, clip_eps=0.05)
    token, _ = grpo_loss_fn(pack, other, importance_sampling_level="sequence", clip_eps=0.05)
    sequence.backward()
    token.backward()
    assert 0 < stats["clip_frac"] < 1
    assert token.item() == pytest.approx(sequence.item(), abs=1e-12)
    torch.testing.assert_close(other.grad, one.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize(("low", "high"), [(3e-4, None), (0.05, None), (0.05, 0.3)])
@pytest.mark.parametrize(("c", "kl_coef"), [(None, 0.0), (1.1, 0.0), (None, 0.07)])
@pytest.mark.parametrize("weighted", [False, True])
def test_gspo(dtype, tol, low, high, c, kl_coef, weighted):
    for seed in range(3):
        rows = random_rows(seed, constant_advantage=True)
        expected = gspo_by_hand(rows, low, high or low, c, kl_coef, weighted)
        how = {"clip_eps": low, "clip_eps_higher": high, "c_clip": c, "kl_coef": kl_coef}
        stats = check(partial(gspo_loss_fn, **how), rows, expected, dtype, tol, weighted)
        assert stats["ratio"].shape == (4,)  # one of the five rows has no trained token
        assert 0 <= stats["clip_frac"].item() <= 1


def test_a_loss_takes_clip_ranges_that_a_configuration_refuses():
    pack, logprobs = pack_of(random_rows())
    for loss_fn in (grpo_loss_fn, ppo_loss_fn, gspo_loss_fn):
        expected = loss_fn(pack, logprobs, clip_eps=0.25)[0]
        for same in (np.float32(0.25), torch.tensor(0.25)):
            assert loss_fn(pack, logprobs, clip_eps=same)[0].item() == pytest.approx(expected.item())
        unclipped, stats = loss_fn(pack, logprobs, clip_eps=float("inf"), c_clip=None)
        assert unclipped.isfinite()
        assert not any(value.any() for name, value in stats.items() if name.startswith("clip_frac"))
        assert loss_fn(pack, logprobs, clip_eps=0.0)[0].isfinite()


def test_wrong_settings_are_named():
    pack, logprobs = pack_of(random_rows())
    with pytest.raises(ValueError, match="norm_length"):
        grpo_loss_fn(pack, logprobs, reduction="seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="expected seq_mean_token_mean"):
        grpo_loss_fn(pack, logprobs, reduction="mean")  # type: ignore[arg-type]
    for name, expected in {
        "kl_estimator": "k1, k2 or k3",
        "surrogate": "clip, unclipped",
        "importance_sampling_level": "token or sequence",
        "prox_logp_method": "recompute or loglinear",
    }.items():
        with pytest.raises(ValueError, match=f"{name} is 'k9'; expected {expected}"):
            ppo_loss_fn(pack, logprobs, kl_coef=0.1, **{name: "k9"})
    pack.ref_logprobs = pack.old_logprobs = pack.staleness = None
    with pytest.raises(DataError, match=r"TrainSequence\.logprobs"):
        gspo_loss_fn(pack, logprobs)
    with pytest.raises(TypeError, match="clip_epsilon"):
        ppo_loss_fn(pack, logprobs, clip_epsilon=0.2)
