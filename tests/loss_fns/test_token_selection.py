"""Each selection of tokens against its paper's rule as plain loops in float64, and the loss of the chosen tokens."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from areno.loss_fns import grpo_loss_fn
from areno.loss_fns.token_selection import ClipCov, KLCov, TopEntropy
from areno.trainers.off_policy_correction import select_tokens
from areno.types import TrainSequence
from tests.helpers.loss_rows import PRECISIONS, check, pack_of, random_rows, token_weight, trained


def drawn(n=400, seed=0):
    rng = np.random.default_rng(seed)
    return -rng.exponential(1, n), rng.normal(size=n), rng.exponential(0.5, n)


def covariances(logprobs, advantages):
    n = len(logprobs)
    mean_lp, mean_a = sum(logprobs) / n, sum(advantages) / n
    return [(lp - mean_lp) * (a - mean_a) for lp, a in zip(logprobs, advantages, strict=True)]


@pytest.mark.parametrize("share", [0.2, 0.05, 0.5])
def test_top_entropy(share):
    logprobs, advantages, entropies = drawn()
    chosen = TopEntropy(share=share).choose(logprobs, advantages, entropies, seed=0)
    n = math.floor(share * len(entropies))
    assert n <= chosen.sum() <= n + 1
    assert entropies[chosen].min() > entropies[~chosen].max()


@pytest.mark.parametrize("share", [2e-4, 0.02, 0.9])
def test_clip_cov(share):
    logprobs, advantages, _ = drawn()
    cov = covariances(logprobs, advantages)
    candidates = {t for t, value in enumerate(cov) if 1.0 < value < 5.0}
    found = [ClipCov(share=share).choose(logprobs, advantages, None, seed=seed) for seed in (0, 0, 1)]
    for chosen in found:
        assert set(np.flatnonzero(chosen)) <= candidates
        assert chosen.sum() == min(max(1, int(share * len(cov))), len(candidates))
    assert (found[0] == found[1]).all()
    assert share == 0.9 or (found[0] != found[2]).any()


def test_clip_cov_without_candidates():
    assert not ClipCov().choose(np.full(5, -1.0), np.zeros(5), None, seed=0).any()


@pytest.mark.parametrize("share", [2e-4, 0.02])
def test_kl_cov(share):
    logprobs, advantages, _ = drawn()
    cov = covariances(logprobs, advantages)
    largest = sorted(range(len(cov)), key=lambda t: -cov[t])[: max(1, int(share * len(cov)))]
    chosen = KLCov(share=share).choose(logprobs, advantages, None, seed=0)
    assert sorted(np.flatnonzero(chosen)) == sorted(largest)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean"])
def test_the_penalty_of_chosen_tokens(dtype, tol, reduction):
    rows, coef = random_rows(2, spread=0.6), 0.7
    loss, grads, flags = 0.0, [], []
    for number, row in enumerate(rows):
        grad, flag = [0.0] * len(row["mask"]), [float((t + number) % 2) for t in range(len(row["mask"]))]
        for t in trained(row):
            share, log_r = token_weight(rows, row, reduction, 10), row["outputs"][t] - row["old_logprobs"][t]
            r, a = math.exp(log_r), row["advantages"][t]
            loss += share * (-r * a + coef * flag[t] * abs(log_r))
            grad[t] = share * (-r * a + coef * flag[t] * math.copysign(1, log_r))
        grads, flags = grads + grad, flags + flag

    def loss_fn(pack, outputs):
        pack.kl_weights = coef * torch.tensor(flags, dtype=dtype)
        return grpo_loss_fn(pack, outputs, surrogate="unclipped", reduction=reduction)

    check(loss_fn, rows, (loss, grads), dtype, tol)


def test_fresh_samples_have_the_gradient_of_grpo():
    rows = random_rows(spread=0.0)
    (pack, one), (_, other) = pack_of(rows), pack_of(rows)
    grpo_loss_fn(pack, one)[0].backward()
    pack.kl_weights = torch.ones_like(pack.old_logprobs)
    partial(grpo_loss_fn, surrogate="unclipped")(pack, other)[0].backward()
    assert torch.equal(one.grad, other.grad)


def sequences():
    found = []
    for n, a in ((3, 1.0), (5, -1.0)):
        mask = [True, *[False] * n]
        logprobs = [0.0, *(-0.1 - 0.3 * t for t in range(n))]
        found.append(TrainSequence(prompt_mask=mask, tokens=[0] * (n + 1), logprobs=logprobs, advantages=[a] * (n + 1)))
    return found


def test_rows_get_weights():
    entropies = [[0.0, 0.1, 0.9, 0.2], [0.0, 0.8, 0.3, 0.4, 0.1, 0.2]]
    rows = sequences()
    rows[0].weights, rows[1].weights = [0.0, 2.0, 3.0, 4.0], [0.0, *[1.0] * 5]
    assert select_tokens(rows, TopEntropy(share=0.25), entropies, seed=0) == 0.25
    assert [list(row.weights) for row in rows] == [[0.0, 0.0, 3.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]
    rows = sequences()
    share = select_tokens(rows, ClipCov(low=0.0, share=0.3), None, seed=0)
    dropped = sum(weight == 0 for row in rows for weight in row.weights[1:])
    assert share == dropped / 8 == 0.25
    rows = sequences()
    select_tokens(rows, KLCov(share=0.3, coef=2.0), None, seed=0)
    assert sorted(weight for row in rows for weight in row.kl_weights)[-3:] == [0.0, 2.0, 2.0]
    assert rows[0].weights is None
