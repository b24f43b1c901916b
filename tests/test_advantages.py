"""Group advantages against a plain loop, and the cases where rounding or missing rewards must not turn into signal."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from areno.errors import DataError
from areno.loss_fns.advantages import group_advantages


def by_hand(rewards, groups, mean_level, std_level, unbiased, eps):
    def peers(i, level):
        return [
            r
            for r, g in zip(rewards, groups, strict=True)
            if not math.isnan(r) and (level == "batch" or g == groups[i])
        ]

    out = []
    for i, reward in enumerate(rewards):
        if math.isnan(reward):
            out.append(0.0)
            continue
        value = reward
        if mean_level:
            value -= statistics.fmean(peers(i, mean_level))
        if std_level:
            known = peers(i, std_level)
            spread = (statistics.stdev if unbiased else statistics.pstdev)(known)
            value /= spread + eps
        out.append(value)
    return out


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("mean_level", "std_level"), list(itertools.product([None, "group", "batch"], repeat=2)))
def test_matches_the_formula(mean_level, std_level, unbiased):
    rng = random.Random(0)
    groups = [i // 4 for i in range(24)]
    rng.shuffle(groups)
    rewards = [rng.gauss(3.0, 2.0) for _ in groups]
    rewards[5] = math.nan
    got = group_advantages(rewards, groups, mean_level, std_level, unbiased, 1e-3)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, by_hand(rewards, groups, mean_level, std_level, unbiased, 1e-3), rtol=0, atol=1e-9)


@pytest.mark.parametrize("value", [0.9, 0.1, 1 / 3, -2.7, 1e8 + 0.3])
@pytest.mark.parametrize("n", [2, 3, 8, 11])
@pytest.mark.parametrize("levels", [("group", "group"), ("group", None), ("batch", "group"), (None, "group")])
def test_equal_rewards_give_exactly_zero(value, n, levels):
    rewards = [value] * n + [0.0, 1.0]
    got = group_advantages(rewards, [7] * n + [8, 8], *levels)
    assert got[:n].tolist() == [0.0] * n
    assert got[n] != got[n + 1]


def test_excluded_samples_stay_out_of_the_mean():
    got = group_advantages([1.0, math.nan, 0.0, 1.0, math.nan, 5.0], [0, 0, 0, 0, 1, 1])
    std = statistics.pstdev([1.0, 0.0, 1.0]) + 1e-6
    np.testing.assert_allclose(got[:4], [(1 / 3) / std, 0.0, (-2 / 3) / std, (1 / 3) / std], atol=1e-12)
    assert got[4:].tolist() == [0.0, 0.0]  # one known sample left: nothing to compare it with


@pytest.mark.parametrize("unbiased", [False, True])
def test_nothing_known(unbiased):
    assert group_advantages([math.nan] * 3, [0, 0, 1], std_unbiased=unbiased).tolist() == [0.0] * 3
    assert group_advantages([], []).tolist() == []


def test_small_differences_on_a_large_offset_survive():
    got = group_advantages([1e9, 1e9 + 1, 1e9, 1e9 + 1], [0] * 4)
    np.testing.assert_allclose(got, np.array([-0.5, 0.5, -0.5, 0.5]) / (0.5 + 1e-6), rtol=1e-12)


def test_wrong_input_is_named():
    with pytest.raises(DataError, match="sample 1 is infinite"):
        group_advantages([0.0, math.inf], [0, 0])
    with pytest.raises(DataError, match="equal length"):
        group_advantages([0.0, 1.0], [0])
