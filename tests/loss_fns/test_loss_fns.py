"""What holds for every loss: it does not matter how a step is cut, nor what stands where nothing is trained."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import areno.loss_fns
from areno.loss_fns import grpo_loss_fn, gspo_loss_fn, ppo_loss_fn, sft_loss_fn, value_loss_fn
from tests.helpers.loss_rows import PER_TOKEN, interpolates, pack_of, random_rows

POLICY_LOSSES = [
    grpo_loss_fn,
    partial(grpo_loss_fn, reduction="token_mean", kl_coef=0.1),
    partial(
        grpo_loss_fn, reduction="seq_mean_token_sum_norm", norm_length=7, c_clip=2.0, kl_coef=0.1, kl_estimator="k2"
    ),
    partial(ppo_loss_fn, kl_coef=0.1, kl_estimator="k1"),
    partial(ppo_loss_fn, prox_logp_method="loglinear"),
    partial(grpo_loss_fn, surrogate="cispo"),
    partial(grpo_loss_fn, surrogate="sapo", kl_coef=0.1),
    partial(grpo_loss_fn, importance_sampling_level="sequence", clip_eps=0.1),
    partial(ppo_loss_fn, importance_sampling_level="sequence", surrogate="sapo", prox_logp_method="loglinear"),
    partial(gspo_loss_fn, clip_eps=0.1, kl_coef=0.1),
]
LOSSES = [sft_loss_fn, value_loss_fn, *POLICY_LOSSES]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_shares_add_up_however_the_step_is_cut(loss_fn, weighted):
    rows = random_rows()
    how = {"weighted": weighted, "interpolated": interpolates(loss_fn)}
    pack, outputs = pack_of(rows, **how)
    loss, stats = loss_fn(pack, outputs)
    loss.backward()
    total, grads, sums = 0.0, [], {}
    for part in (rows[:1], rows[1:4], rows[4:]):
        step = {"step_rows": pack.step_rows, "step_tokens": pack.step_tokens}
        share_pack, share_outputs = pack_of(part, **how, **step)
        share, share_stats = loss_fn(share_pack, share_outputs)
        share.backward()
        total += share.item()
        grads.append(share_outputs.grad)
        for name, value in share_stats.items():
            sums[name] = torch.cat([sums[name], value]) if value.dim() and name in sums else sums.get(name, 0) + value
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), outputs.grad, atol=1e-12, rtol=0)
    for name, value in stats.items():
        torch.testing.assert_close(sums[name], value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_rows_without_trained_tokens_give_zero(loss_fn, weighted):
    rows = [row for row in random_rows() if not any(row["mask"])]
    pack, outputs = pack_of(rows, weighted=weighted, interpolated=interpolates(loss_fn))
    loss, stats = loss_fn(pack, outputs)
    loss.backward()
    assert loss.item() == 0
    assert outputs.grad.tolist() == [0.0] * 3
    assert all(value.dim() == 1 or value.item() == 0 for value in stats.values())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_values_outside_the_mask_do_not_matter(loss_fn, garbage):
    """Content at untrained positions never leaks: loss, gradient and statistics stay the same, bit for bit."""
    rows = random_rows()
    how = {"weighted": True, "interpolated": interpolates(loss_fn)}
    pack, outputs = pack_of(rows, **how)
    expected, expected_stats = loss_fn(pack, outputs)
    expected.backward()
    for row in rows:
        for t, m in enumerate(row["mask"]):
            if not m:
                row |= {name: [*row[name][:t], garbage, *row[name][t + 1 :]] for name in (*PER_TOKEN, "outputs")}
    pack, dirty = pack_of(rows, **how)
    loss, stats = loss_fn(pack, dirty)
    loss.backward()
    assert loss.item() == expected.item()
    assert torch.equal(dirty.grad, outputs.grad)
    assert stats.keys() == expected_stats.keys()
    assert all(torch.equal(value, expected_stats[name]) for name, value in stats.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_fn", [sft_loss_fn, *POLICY_LOSSES])
@pytest.mark.parametrize("gap", [150.0, -150.0, math.inf, -math.inf])
def test_far_apart_policies_give_finite_gradients(loss_fn, gap, dtype):
    for advantage in (-1.0, 0.0, 1.0):
        rows = random_rows()
        for row in rows:
            row["advantages"] = [advantage] * len(row["mask"])
            row["old_logprobs"] = [lp - gap for lp in row["outputs"]]
            row["ref_logprobs"] = list(row["old_logprobs"])
        pack, outputs = pack_of(rows, weighted=True, interpolated=interpolates(loss_fn), dtype=dtype)
        loss, stats = loss_fn(pack, outputs)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(outputs.grad).all()
        assert all(torch.isfinite(value).all() for value in stats.values())


def test_every_public_name_can_be_had():
    for name in areno.loss_fns.__all__:
        assert getattr(areno.loss_fns, name).__doc__
    assert set(areno.loss_fns.__all__) <= set(dir(areno.loss_fns))
    assert not hasattr(areno.loss_fns, "grpo_loss")
