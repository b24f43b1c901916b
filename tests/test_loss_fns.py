"""Each loss against the paper's formula written as plain loops in float64: values and gradients."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import pytest
import torch

from areno.errors import DataError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.pack import DataPack
from areno.loss_fns.sft import sft_loss_fn

PER_TOKEN = ("old_logprobs", "advantages", "ref_logprobs", "entropy")


def random_rows(seed=0, constant_advantage=False, spread=0.4):
    """Rows as dicts of lists; masks have holes, one row has no trained token, one has a single one."""
    rng = random.Random(seed)
    rows = []
    for mask in ([0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1], [0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 1, 1, 1, 1, 1]):
        n, advantage = len(mask), rng.gauss(0, 1)
        old = [-rng.expovariate(1) for _ in mask]
        rows.append(
            {
                "mask": mask,
                "logprobs": [o + rng.gauss(0, spread) for o in old],
                "old_logprobs": old,
                "ref_logprobs": [o + rng.gauss(0, 0.5) for o in old],
                "advantages": [advantage if constant_advantage else rng.gauss(0, 1) for _ in range(n)],
                "entropy": [rng.random() for _ in mask],
            }
        )
    return rows


def pack_of(rows, step_rows=None, step_tokens=None, dtype=torch.float64):
    flat = {name: [v for row in rows for v in row[name]] for name in (*PER_TOKEN, "logprobs", "mask")}
    mask = torch.tensor(flat["mask"]).bool()
    pack = DataPack(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        row_of_token=torch.tensor([i for i, row in enumerate(rows) for _ in row["mask"]]),
        loss_mask=mask,
        n_rows=len(rows),
        step_tokens=int(mask.sum()) if step_tokens is None else step_tokens,
        step_rows=sum(any(row["mask"]) for row in rows) if step_rows is None else step_rows,
        **{name: torch.tensor(flat[name], dtype=dtype) for name in PER_TOKEN},
    )
    return pack, torch.tensor(flat["logprobs"], dtype=dtype, requires_grad=True)


def trained(row):
    return [t for t, m in enumerate(row["mask"]) if m]


def surrogate(ratio, a, low, high, c):
    """The value, and its derivative with respect to the ratio."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    value, slope = -min(ratio * a, clipped * a), (-a if ratio * a <= clipped * a else 0.0)
    if c is not None and a < 0 and value > -c * a:
        value, slope = -c * a, 0.0
    return value, slope


def weight(rows, row, reduction, norm_length):
    n_rows, n_tokens = sum(any(r["mask"]) for r in rows), sum(sum(r["mask"]) for r in rows)
    if reduction == "seq_mean_token_mean":
        return 1 / (n_rows * len(trained(row)))
    return 1 / n_tokens if reduction == "token_mean" else 1 / (n_rows * norm_length)


def grpo_by_hand(rows, low=0.2, high=0.2, c=None, reduction="seq_mean_token_mean", norm_length=None, kl_coef=0.0):
    loss, grads = 0.0, []
    for row in rows:
        grad = [0.0] * len(row["mask"])
        for t in trained(row):
            w = weight(rows, row, reduction, norm_length)
            lp, ref = row["logprobs"][t], row["ref_logprobs"][t]
            ratio = math.exp(lp - row["old_logprobs"][t])
            value, slope = surrogate(ratio, row["advantages"][t], low, high, c)
            kl = math.exp(ref - lp) - (ref - lp) - 1
            loss += w * (value + kl_coef * kl)
            grad[t] = w * (slope * ratio + kl_coef * (1 - math.exp(ref - lp)))
        grads += grad
    return loss, grads


def gspo_by_hand(rows, low=3e-4, high=3e-4, c=None, kl_coef=0.0):
    loss, grads = 0.0, []
    n_rows = sum(any(r["mask"]) for r in rows)
    for row in rows:
        grad, steps = [0.0] * len(row["mask"]), trained(row)
        if steps:
            s = math.exp(sum(row["logprobs"][t] - row["old_logprobs"][t] for t in steps) / len(steps))
            value, slope = surrogate(s, row["advantages"][0], low, high, c)
            loss += value / n_rows
            for t in steps:
                lp, ref = row["logprobs"][t], row["ref_logprobs"][t]
                loss += kl_coef * (math.exp(ref - lp) - (ref - lp) - 1) / len(steps) / n_rows
                grad[t] = (slope * s + kl_coef * (1 - math.exp(ref - lp))) / len(steps) / n_rows
        grads += grad
    return loss, grads


def check(loss_fn, rows, expected, dtype, tol):
    pack, logprobs = pack_of(rows, dtype=dtype)
    loss, stats = loss_fn(pack, logprobs)
    loss.backward()
    assert loss.dim() == 0
    assert loss.item() == pytest.approx(expected[0], abs=tol, rel=tol)
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected[1], dtype=dtype), atol=tol, rtol=tol)
    assert not any(value.requires_grad for value in stats.values())
    return stats


PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 1e-5)]


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
def test_sft(dtype, tol):
    rows = random_rows()
    n = sum(sum(row["mask"]) for row in rows)
    loss = -sum(row["logprobs"][t] for row in rows for t in trained(row)) / n
    grads = [-m / n for row in rows for m in row["mask"]]
    stats = check(sft_loss_fn, rows, (loss, grads), dtype, tol)
    assert stats["entropy"].item() == pytest.approx(sum(row["entropy"][t] for row in rows for t in trained(row)) / n)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize(("high", "c", "kl_coef"), list(itertools.product([None, 0.5], [None, 1.3], [0.0, 0.07])))
def test_grpo(dtype, tol, reduction, high, c, kl_coef):
    rows = random_rows()
    how = {"c_clip": c, "reduction": reduction, "norm_length": 10, "kl_coef": kl_coef}
    expected = grpo_by_hand(rows, 0.2, high or 0.2, c, reduction, 10, kl_coef)
    stats = check(partial(grpo_loss_fn, clip_eps_higher=high, **how), rows, expected, dtype, tol)

    tokens = [(row, t) for row in rows for t in trained(row)]
    ratios = [math.exp(row["logprobs"][t] - row["old_logprobs"][t]) for row, t in tokens]
    advantages = [row["advantages"][t] for row, t in tokens]
    torch.testing.assert_close(stats["ratio"], torch.tensor(ratios, dtype=dtype))
    low_cut = sum(r < 0.8 and a < 0 for r, a in zip(ratios, advantages, strict=True)) / len(tokens)
    high_cut = sum(r > 1 + (high or 0.2) and a > 0 for r, a in zip(ratios, advantages, strict=True)) / len(tokens)
    assert low_cut > 0
    assert high_cut > 0
    assert stats["clip_frac_low"].item() == pytest.approx(low_cut, rel=1e-5)
    assert stats["clip_frac"].item() == pytest.approx(low_cut + high_cut, rel=1e-5)
    assert stats["advantage_mean"].item() == pytest.approx(sum(advantages) / len(tokens), rel=1e-5)
    k3 = sum(r - 1 - math.log(r) for r in ratios) / len(tokens)
    assert stats["approx_kl"].item() == pytest.approx(k3, rel=1e-4)
    assert ("kl_loss" in stats) == (kl_coef > 0)
    plain = grpo_by_hand(rows, 0.2, high or 0.2, c, reduction, 10)[0]
    assert stats["policy_loss"].item() == pytest.approx(plain, abs=1e-5)
    if c is not None:
        assert stats["clip_frac_dual"].item() > 0


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize(("low", "high"), [(3e-4, None), (0.05, None), (0.05, 0.3)])
@pytest.mark.parametrize(("c", "kl_coef"), [(None, 0.0), (1.1, 0.0), (None, 0.07)])
def test_gspo(dtype, tol, low, high, c, kl_coef):
    for seed in range(3):
        rows = random_rows(seed, constant_advantage=True)
        expected = gspo_by_hand(rows, low, high or low, c, kl_coef)
        how = {"clip_eps": low, "clip_eps_higher": high, "c_clip": c, "kl_coef": kl_coef}
        stats = check(partial(gspo_loss_fn, **how), rows, expected, dtype, tol)
        assert stats["ratio"].shape == (4,)  # one of the five rows has no trained token
        assert 0 <= stats["clip_frac"].item() <= 1


LOSSES = [
    sft_loss_fn,
    grpo_loss_fn,
    partial(grpo_loss_fn, reduction="token_mean", kl_coef=0.1),
    partial(grpo_loss_fn, reduction="seq_mean_token_sum_norm", norm_length=7, c_clip=2.0),
    partial(gspo_loss_fn, clip_eps=0.1, kl_coef=0.1),
]


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_shares_add_up_however_the_step_is_cut(loss_fn):
    rows = random_rows(constant_advantage=True)
    pack, logprobs = pack_of(rows)
    loss, stats = loss_fn(pack, logprobs)
    loss.backward()
    total, grads, sums = 0.0, [], {}
    for part in (rows[:1], rows[1:4], rows[4:]):
        share_pack, share_logprobs = pack_of(part, pack.step_rows, pack.step_tokens)
        share, share_stats = loss_fn(share_pack, share_logprobs)
        share.backward()
        total += share.item()
        grads.append(share_logprobs.grad)
        for name, value in share_stats.items():
            sums[name] = torch.cat([sums[name], value]) if value.dim() and name in sums else sums.get(name, 0) + value
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), logprobs.grad, atol=1e-12, rtol=0)
    for name, value in stats.items():
        torch.testing.assert_close(sums[name], value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_rows_without_trained_tokens_give_zero(loss_fn):
    pack, logprobs = pack_of([row for row in random_rows() if not any(row["mask"])])
    loss, stats = loss_fn(pack, logprobs)
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.tolist() == [0.0] * 3
    assert all(value.dim() == 1 or value.item() == 0 for value in stats.values())


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_values_outside_the_mask_do_not_matter(loss_fn):
    rows = random_rows(constant_advantage=True)
    pack, logprobs = pack_of(rows)
    expected = loss_fn(pack, logprobs)[0]
    for row in rows:
        for t, m in enumerate(row["mask"]):
            if not m:
                row |= {name: [*row[name][:t], math.nan, *row[name][t + 1 :]] for name in (*PER_TOKEN, "logprobs")}
    pack, logprobs = pack_of(rows)
    loss, _ = loss_fn(pack, logprobs)
    loss.backward()
    assert loss.item() == expected.item()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("gap", [150.0, -150.0, math.inf, -math.inf])
def test_far_apart_policies_give_finite_gradients(loss_fn, gap, dtype):
    for advantage in (-1.0, 0.0, 1.0):
        rows = random_rows()
        for row in rows:
            row["advantages"] = [advantage] * len(row["mask"])
            row["old_logprobs"] = [lp - gap for lp in row["logprobs"]]
            row["ref_logprobs"] = list(row["old_logprobs"])
        pack, logprobs = pack_of(rows, dtype=dtype)
        loss, stats = loss_fn(pack, logprobs)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()
        assert all(torch.isfinite(value).all() for value in stats.values())


def test_wrong_settings_are_named():
    pack, logprobs = pack_of(random_rows())
    with pytest.raises(ValueError, match="norm_length"):
        grpo_loss_fn(pack, logprobs, reduction="seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="expected seq_mean_token_mean"):
        grpo_loss_fn(pack, logprobs, reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kl_estimator"):
        grpo_loss_fn(pack, logprobs, kl_coef=0.1, kl_estimator="k9")  # type: ignore[arg-type]
    pack.ref_logprobs = pack.old_logprobs = None
    with pytest.raises(DataError, match=r"TrainSequence\.logprobs"):
        gspo_loss_fn(pack, logprobs)
