"""Importance weights and masks for rows of another policy, against loops over tokens."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from areno.errors import DataError
from areno.loss_fns import behave_weights, m2_keep


def random_logprobs(seed=0, spread=0.8):
    rng = random.Random(seed)
    behave = [[-rng.expovariate(1) for _ in range(n)] for n in (3, 0, 1, 6, 2, 5)]
    return [[b + rng.gauss(0, spread) for b in row] for row in behave], behave


def binary_kl(p, q):
    p, q = min(p, 1 - 1e-8), min(q, 1 - 1e-8)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def metric_of(log_r, old, metric):
    p, q = math.exp(old + log_r), math.exp(old)
    return {
        "binary_kl": max(binary_kl(p, q), binary_kl(q, p)),
        "ratio": math.exp(log_r),
        "kl_k1": log_r,
        "kl_k2": log_r**2 / 2,
        "kl_k3": math.exp(log_r) - log_r - 1,
    }[metric]


def aggregate(values, agg):
    return {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[agg]


def by_hand(prox, behave, level, action, metric, agg, upper, lower):
    weights, keep = [], []
    for new, old in zip(prox, behave, strict=True):
        log_rs = [n - o for n, o in zip(new, old, strict=True)]
        row_weights, row_keep = [], []
        for log_r, b in zip(log_rs, old, strict=True):
            weight, judged = math.exp(log_r), metric_of(log_r, b, metric)
            if level == "sequence" and metric == "ratio":
                weight, judged = math.exp(sum(log_rs) / len(log_rs)), math.exp(aggregate(log_rs, agg))
            elif level == "sequence":
                judged = aggregate([metric_of(x, b, metric) for x, b in zip(log_rs, old, strict=True)], agg)
            accepted = judged <= upper and (lower is None or judged >= lower)
            kept = action == "clamp" or accepted
            if action == "clamp" and not accepted:
                weight = min(max(weight, lower or 0.0), upper)
            row_weights.append(weight if kept else 0.0)
            row_keep.append(kept)
        weights.append(row_weights)
        keep.append(row_keep)
    return weights, keep


CASES = [
    *itertools.product(["token"], ["mask"], ["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"], ["mean"]),
    *itertools.product(
        ["sequence"], ["mask"], ["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"], ["sum", "mean", "max"]
    ),
    ("token", "clamp", "ratio", "mean"),
    *itertools.product(["sequence"], ["clamp"], ["ratio"], ["sum", "mean", "max"]),
]


@pytest.mark.parametrize(("level", "action", "metric", "agg"), CASES)
@pytest.mark.parametrize("bounded_below", [False, True])
def test_behave_weights(level, action, metric, agg, bounded_below):
    upper, lower = {
        "ratio": (1.2, 0.8),
        "kl_k1": (0.3, -0.3),
        "kl_k2": (0.2, 0.01),
        "kl_k3": (0.2, 0.01),
        "binary_kl": (0.1, 0.01),
    }[metric]
    kept = []
    for seed in range(3):
        prox, behave = random_logprobs(seed)
        how = {"level": level, "action": action, "metric": metric, "agg": agg, "upper": upper}
        weights, keep = behave_weights(prox, behave, lower=lower if bounded_below else None, **how)
        expected = by_hand(prox, behave, lower=lower if bounded_below else None, **how)
        for i in range(len(prox)):
            np.testing.assert_allclose(weights[i], expected[0][i], rtol=1e-12)
            assert keep[i].tolist() == expected[1][i]
            assert (weights[i].dtype, keep[i].dtype) == (np.float64, np.bool_)
        kept += [value for row in keep for value in row]
    assert any(kept)
    assert all(kept) == (action == "clamp")


def test_without_bounds_the_weight_is_the_ratio():
    prox, behave = random_logprobs()
    weights, keep = behave_weights(prox, behave)
    for new, old, row, kept in zip(prox, behave, weights, keep, strict=True):
        np.testing.assert_allclose(row, np.exp(np.subtract(new, old)))
        assert kept.all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("agg", ["sum", "mean"])
def test_weights_stay_finite(level, agg):
    for sign in (1, -1):
        weights, keep = behave_weights(
            [[sign * 900.0] * 4], [[0.0] * 4], level=level, agg=agg, action="mask", upper=5.0, lower=0.2
        )
        assert weights[0].tolist() == [0.0] * 4
        assert not keep[0].any()
    assert np.isfinite(behave_weights([[900.0]], [[0.0]])[0][0]).all()


def test_settings_that_cannot_be_meant():
    prox, behave = random_logprobs()
    for metric in ("kl_k1", "kl_k2", "kl_k3"):
        with pytest.raises(
            ValueError, match=f"clamp bounds a ratio, but metric is {metric}; use metric ratio or action"
        ):
            behave_weights(prox, behave, action="clamp", metric=metric, upper=1.0)
    for name in ("level", "action", "metric", "agg"):
        with pytest.raises(ValueError, match=f"{name} is 'no'; expected"):
            behave_weights(prox, behave, **{name: "no"})
    with pytest.raises(DataError, match="row 2: 1 proximal and 2 behaviour"):
        behave_weights(prox, [*behave[:2], [0.0, 0.0], *behave[3:]])
    with pytest.raises(DataError, match="6 rows of proximal and 5"):
        behave_weights(prox, behave[:-1])
    with pytest.raises(DataError, match="row 0: a log-probability is not finite"):
        m2_keep([[math.nan]], [[0.0]], [[1.0]], 0.04)


def m2_by_hand(prox, behave, advantages, threshold):
    """Algorithm 1 taken literally: while the mean over the candidates left is too large, mask the largest."""
    second, keep = {}, [[True] * len(row) for row in prox]
    for i, row in enumerate(prox):
        for t, new in enumerate(row):
            ratio = math.exp(new - behave[i][t])
            if (advantages[i][t] > 0 and ratio > 1) or (advantages[i][t] < 0 and ratio < 1):
                second[i, t] = (new - behave[i][t]) ** 2
    while second and sum(second.values()) / len(second) > threshold:
        i, t = max(second, key=lambda at: second[at])
        del second[i, t]
        keep[i][t] = False
    return keep


@pytest.mark.parametrize("threshold", [1e-6, 0.04, 0.3, 100.0])
def test_m2_keep(threshold):
    for seed in range(5):
        prox, behave = random_logprobs(seed)
        rng = random.Random(seed)
        advantages = [[rng.choice([-1.0, 0.0, 1.0]) for _ in row] for row in prox]
        keep = m2_keep(prox, behave, advantages, threshold)
        expected = m2_by_hand(prox, behave, advantages, threshold)
        assert [row.tolist() for row in keep] == expected
        assert all(row.dtype == np.bool_ for row in keep)
        if threshold == 100.0:
            assert all(row.all() for row in keep)
        if threshold == 0.04:
            assert not all(row.all() for row in keep)


def test_m2_keep_leaves_what_brings_the_policy_back():
    """Far from the behaviour policy, but pushed towards it, or not pushed at all."""
    keep = m2_keep([[2.0, -2.0, 2.0, 2.0]], [[0.0] * 4], [[-1.0, 1.0, 0.0, 1.0]], 0.04)
    assert keep[0].tolist() == [True, True, True, False]
    assert m2_keep([[0.5]], [[0.0]], [[1.0]], 0.25)[0].all()  # a mean at the threshold is at most the threshold
    assert m2_keep([], [], [], 0.04) == []
    with pytest.raises(ValueError, match="m2_threshold is 0"):
        m2_keep([[0.0]], [[0.0]], [[1.0]], 0.0)
    with pytest.raises(DataError, match="advantages"):
        m2_keep([[0.0]], [[0.0]], [[1.0, 1.0]], 0.04)
