"""Group advantages against a plain loop, and the cases where rounding or missing rewards must not turn into signal."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from areno.errors import DataError
from areno.loss_fns.advantages import group_advantages, normalize_tokens


def by_hand(rewards, groups, mean_level, std_level, unbiased, eps, leave1out=False):
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
            others = peers(i, mean_level)
            if leave1out:
                others.remove(reward)
            value -= statistics.fmean(others)
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


@pytest.mark.parametrize("mean_level", ["group", "batch"])
@pytest.mark.parametrize("std_level", [None, "group", "batch"])
def test_leave_one_out_is_the_distance_to_the_mean_of_the_others(mean_level, std_level):
    rng = random.Random(1)
    groups = [i // 4 for i in range(24)]
    rewards = [rng.gauss(3.0, 2.0) for _ in groups]
    rewards[5] = math.nan
    got = group_advantages(rewards, groups, mean_level, std_level, False, 1e-3, mean_leave1out=True)
    expected = by_hand(rewards, groups, mean_level, std_level, False, 1e-3, leave1out=True)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


def test_rloo_by_hand():
    """R_i less the mean of the others; one sample, or one known, has nobody to compare it with and gives exactly 0."""
    rewards, groups = [1.0, 0.0, 0.5, 7.0, 3.0, math.nan], [0, 0, 0, 1, 2, 2]
    got = group_advantages(rewards, groups, std_level=None, mean_leave1out=True)
    np.testing.assert_allclose(got, [0.75, -0.75, 0.0, 0.0, 0.0, 0.0], atol=1e-15)
    assert got[3:].tolist() == [0.0] * 3
    assert group_advantages([0.1] * 3, [0] * 3, std_level=None, mean_leave1out=True).tolist() == [0.0] * 3


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
    with pytest.raises(ValueError, match="mean_leave1out is set, but mean_level is null"):
        group_advantages([0.0, 1.0], [0, 0], mean_level=None, mean_leave1out=True)
    with pytest.raises(ValueError, match="are group, batch or null, not 'row'"):
        group_advantages([0.0, 1.0], [0, 0], mean_level="row")  # type: ignore[arg-type]


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("mean_level", "std_level"), list(itertools.product([None, "group", "batch"], repeat=2)))
def test_tokens_are_normalised_over_the_tokens_of_the_batch_or_group(mean_level, std_level, unbiased):
    rng = random.Random(0)
    values = [[rng.gauss(1.0, 2.0) for _ in range(n)] for n in (3, 1, 0, 4, 2)]
    row_groups = [5, 9, 9, 5, 9]
    got = normalize_tokens([np.array(row) for row in values], row_groups, mean_level, std_level, unbiased, 1e-3)
    assert [len(row) for row in got] == [3, 1, 0, 4, 2]
    groups = [group for group, row in zip(row_groups, values, strict=True) for _ in row]
    flat = [value for row in values for value in row]
    expected = by_hand(flat, groups, mean_level, std_level, unbiased, 1e-3)
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=0, atol=1e-12)


def test_whitened_tokens_have_mean_0_and_variance_1():
    rng = np.random.default_rng(0)
    flat = np.concatenate(normalize_tokens([rng.normal(5, 3, n) for n in (7, 20, 3)], [0, 1, 2], eps=0.0))
    assert flat.mean() == pytest.approx(0, abs=1e-12)
    assert flat.std() == pytest.approx(1, abs=1e-12)


def test_equal_tokens_are_exactly_0():
    assert np.concatenate(normalize_tokens([np.full(3, 0.1), np.full(4, 0.1)], [0, 1])).tolist() == [0.0] * 7
    assert normalize_tokens([], []) == []
    assert [row.tolist() for row in normalize_tokens([np.zeros(0)], [0])] == [[]]


def test_rows_and_values_that_do_not_fit():
    with pytest.raises(DataError, match="1 rows of values and 2 group_ids"):
        normalize_tokens([np.zeros(2)], [0, 1])
    with pytest.raises(DataError, match="not finite"):
        normalize_tokens([np.array([0.0, math.nan])], [0])
