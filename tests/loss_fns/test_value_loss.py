"""The critic's loss and GAE against plain loops in float64."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from functools import partial

import numpy as np
import pytest

from areno.errors import DataError
from areno.loss_fns import explained_variance, gae, value_loss_fn
from tests.helpers.loss_rows import PRECISIONS, all_trained, check, pack_of, random_rows, trained


def value_by_hand(rows, c, coef):
    n, loss, grads, clipped = len(all_trained(rows, "outputs")), 0.0, [], 0
    for row in rows:
        grad = [0.0] * len(row["mask"])
        for t in trained(row):
            v, old, target = row["outputs"][t], row["values"][t], row["returns"][t]
            near = min(max(v, old - c), old + c)
            plain, cut = (v - target) ** 2, (near - target) ** 2
            loss += coef * max(plain, cut) / n
            if cut > plain:
                clipped += 1  # near does not move with v there, or it would be v
            else:
                grad[t] = coef * 2 * (v - target) / n
        grads += grad
    return (loss, grads), clipped / n


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize(("c", "coef"), [(0.5, 0.5), (0.1, 1.0), (5.0, 0.3)])
def test_value_loss(dtype, tol, c, coef):
    cut = 0.0
    for seed in range(4):
        rows = random_rows(seed)
        expected, clip_frac = value_by_hand(rows, c, coef)
        cut += clip_frac
        stats = check(partial(value_loss_fn, cliprange_value=c, value_loss_coef=coef), rows, expected, dtype, tol)
        assert stats["value_clip_frac"].item() == pytest.approx(clip_frac)
        assert stats["value_loss"].item() * coef == pytest.approx(expected[0], rel=1e-5)
        values, returns = all_trained(rows, "outputs"), all_trained(rows, "returns")
        assert stats["value_mean"].item() == pytest.approx(statistics.fmean(values), rel=1e-5)
        errors = [r - v for r, v in zip(returns, values, strict=True)]
        assert stats["returns"].tolist() == pytest.approx(returns, rel=1e-5)
        assert stats["value_error"].tolist() == pytest.approx(errors, rel=1e-4, abs=1e-6)
    assert (cut > 0) == (c < 5)


def test_defaults_and_what_is_missing():
    rows = random_rows()
    check(value_loss_fn, rows, value_by_hand(rows, 0.5, 0.5)[0], *PRECISIONS[0])
    pack, values = pack_of(rows)
    pack.returns = None
    with pytest.raises(DataError, match=r"needs returns.*TrainSequence\.returns"):
        value_loss_fn(pack, values)


@pytest.mark.parametrize(("discount", "gae_lambda"), list(itertools.product([1.0, 0.9], [1.0, 0.95, 0.0])))
def test_gae_is_the_sum_of_the_paper(discount, gae_lambda):
    """arXiv 1506.02438 eq. 16: A_t = sum_l (discount lambda)^l delta_t+l, summed for each t anew."""
    rng = random.Random(0)
    for n in (0, 1, 2, 9):
        rewards, values = [rng.gauss(0, 1) for _ in range(n)], [rng.gauss(0, 1) for _ in range(n)]
        after = [*values, 0.0]
        deltas = [rewards[t] + discount * after[t + 1] - values[t] for t in range(n)]
        expected = [sum((discount * gae_lambda) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
        advantages, returns = gae(rewards, values, discount, gae_lambda)
        assert advantages.dtype == returns.dtype == np.float64
        np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(returns, [a + v for a, v in zip(expected, values, strict=True)], atol=1e-12)


def test_gae_with_lambda_one_is_what_is_still_to_come():
    advantages, returns = gae([0.0, 0.5, 1.0], [0.3, 0.2, 0.1], 1.0, 1.0)
    np.testing.assert_allclose(returns, [1.5, 1.5, 1.0])
    np.testing.assert_allclose(advantages, [1.2, 1.3, 0.9])


def test_a_tool_span_carries_the_recursion_across():
    """Trained tokens at 1, 2, 5 of a row, a tool's answer between: the values there are never looked at."""
    values = [9.0, 0.3, 0.2, math.nan, math.inf, 0.1]
    at = [1, 2, 5]
    advantages, _ = gae([0.0, 0.0, 1.0], [values[t] for t in at], 0.9, 0.8)
    last = 1.0 - 0.1
    middle = 0.9 * 0.1 - 0.2 + 0.72 * last
    first = 0.9 * 0.2 - 0.3 + 0.72 * middle
    np.testing.assert_allclose(advantages, [first, middle, last], atol=1e-12)


def test_gae_of_lists_that_do_not_match():
    with pytest.raises(DataError, match="equal length, not 2 and 1"):
        gae([0.0, 1.0], [0.0], 1.0, 1.0)


def test_explained_variance():
    rng = random.Random(0)
    returns = [rng.gauss(2, 3) for _ in range(50)]
    values = [r + rng.gauss(1, 1) for r in returns]
    left = statistics.pvariance([r - v for r, v in zip(returns, values, strict=True)])
    assert explained_variance(values, returns) == pytest.approx(1 - left / statistics.pvariance(returns))
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([1.0, 0.0], [0.0, 1.0]) == -3.0
    assert explained_variance([1.0, 0.0], [0.1 + 0.2, 0.1 + 0.2]) == 0.0
    assert explained_variance([], []) == 0.0


def test_the_statistics_of_the_loss_give_the_explained_variance():
    rows = random_rows()
    stats = value_loss_fn(*pack_of(rows))[1]
    spread = {name: stats[name].std(unbiased=False).item() for name in ("value_error", "returns")}
    expected = explained_variance(all_trained(rows, "outputs"), all_trained(rows, "returns"))
    assert 1 - (spread["value_error"] / spread["returns"]) ** 2 == pytest.approx(expected)
