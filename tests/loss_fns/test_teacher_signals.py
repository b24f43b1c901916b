"""Uses of a teacher's log-probabilities in the policy loss, against their papers' formulas as loops in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from areno.errors import ConfigError, DataError
from areno.launch.compose import load
from areno.loss_fns import distillation_loss_fn, grpo_loss_fn
from areno.loss_fns.teacher_signals import RLSD, SDAR
from areno.recipes.distill import DistillConfig
from areno.recipes.grpo import GRPOConfig
from tests.helpers.loss_rows import PRECISIONS, check, pack_of, random_rows, token_weight, trained


def clipped(log_ratio, a):
    r = math.exp(log_ratio)
    bounded = min(max(r, 0.8), 1.2)
    return -min(r * a, bounded * a), (-a * r if r * a <= bounded * a else 0.0)


def rlsd(log_ratio, a, gap, mix=0.5, eps=0.2):
    sign = (a > 0) - (a < 0)
    return clipped(log_ratio, a * ((1 - mix) + mix * min(max(math.exp(sign * gap), 1 - eps), 1 + eps)))


def sdar(log_ratio, a, gap, coef=0.1, beta=5.0):
    value, slope = clipped(log_ratio, a)
    gate = coef / (1 + math.exp(-beta * gap))
    return value + gate * gap, slope - gate


CASES = {
    "rlsd": ("rlsd", rlsd),
    "rlsd, other": (RLSD(mix=1.0, eps=0.4), partial(rlsd, mix=1.0, eps=0.4)),
    "sdar": ("sdar", sdar),
    "sdar, other": (SDAR(coef=2.0, beta=0.5), partial(sdar, coef=2.0, beta=0.5)),
}


def with_teacher(pack, outputs, loss_fn):
    """The reference's log-probabilities of the rows stand for the teacher's."""
    pack.teacher_logprobs = pack.ref_logprobs
    return loss_fn(pack, outputs)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean"])
def test_signals(case, dtype, tol, reduction):
    signal, formula = CASES[case]
    rows, loss, grads = random_rows(spread=0.6), 0.0, []
    for row in rows:
        grad = [0.0] * len(row["mask"])
        for t in trained(row):
            share, lp = token_weight(rows, row, reduction, 10), row["outputs"][t]
            value, slope = formula(lp - row["old_logprobs"][t], row["advantages"][t], row["ref_logprobs"][t] - lp)
            loss, grad[t] = loss + share * value, share * slope
        grads += grad
    loss_fn = partial(grpo_loss_fn, teacher_signal=signal, reduction=reduction)
    check(partial(with_teacher, loss_fn=loss_fn), rows, (loss, grads), dtype, tol)


def test_rlsd_with_an_equal_teacher_is_grpo():
    rows = random_rows()
    (pack, one), (_, other) = pack_of(rows), pack_of(rows)
    grpo_loss_fn(pack, one)[0].backward()
    pack.teacher_logprobs = other.detach().clone()
    grpo_loss_fn(pack, other, teacher_signal="rlsd")[0].backward()
    assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_iw_opd(dtype, tol, gamma):
    rows, loss, grads = random_rows(spread=0.6), 0.0, []
    n_tokens = sum(sum(row["mask"]) for row in rows)
    for row in rows:
        grad, places = [0.0] * len(row["mask"]), trained(row)
        apart = [row["outputs"][t] - row["ref_logprobs"][t] for t in places]
        for at, t in enumerate(places):
            weight = 1 + gamma * (1 - sum(map(abs, apart[:at])) / sum(map(abs, apart)))
            grad[t] = weight * math.exp(row["outputs"][t] - row["old_logprobs"][t]) * apart[at] / n_tokens
            loss += grad[t]
        grads += grad
    loss_fn = partial(distillation_loss_fn, sampled=True, prefix_weight=gamma)
    check(partial(with_teacher, loss_fn=loss_fn), rows, (loss, grads), dtype, tol)


def test_iw_opd_without_a_difference():
    pack, outputs = pack_of(random_rows())
    pack.teacher_logprobs = outputs.detach().clone()
    loss, _ = distillation_loss_fn(pack, outputs, sampled=True, prefix_weight=0.5)
    loss.backward()
    assert loss == 0
    assert not outputs.grad.any()


def test_a_signal_needs_a_teacher():
    with pytest.raises(DataError, match="teacher_logprobs"):
        grpo_loss_fn(*pack_of(random_rows()), teacher_signal="sdar")


@pytest.mark.parametrize(
    ("recipe", "settings", "problem"),
    [
        (GRPOConfig, ["actor.teacher_signal=rlsd"], "actor.teacher_signal: is set, but it needs a teacher's"),
        (GRPOConfig, ["variant=rlsd", "teacher.loss_type=jsd"], "actor.teacher_signal: is set, but it needs"),
        (GRPOConfig, ["variant=rlsd", "teacher.rl_loss_weight=0"], "teacher.rl_loss_weight: is 0, but actor.teacher"),
        (GRPOConfig, ["variant=rlsd", "actor.teacher_signal=null"], "teacher.distill_loss_weight: is 0, and nothing"),
        (GRPOConfig, ["variant=rlsd", "actor.sdar.beta=1"], "actor.sdar.beta: is 1, but actor.teacher_signal is rlsd"),
        (
            DistillConfig,
            ["variant=iw_opd", "teacher.kl_discount=0.5"],
            "prefix_weight: is 0.5, but kl_discount",
        ),
        (DistillConfig, ["variant=iw_opd", "teacher.loss_type=jsd"], "teacher.prefix_weight: is 0.5, but teacher.loss"),
    ],
)
def test_settings_that_do_not_fit(recipe, settings, problem):
    with pytest.raises(ConfigError) as raised:
        load(recipe, "quickstart" if recipe is GRPOConfig else "quickstart_distill", settings)
    assert problem in str(raised.value)
