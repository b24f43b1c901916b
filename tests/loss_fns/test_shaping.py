"""What is done to rewards, against the cases of the papers' formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from areno.loss_fns import overlong_penalty, shape_rewards


def test_overlong_penalty_is_dapos_equation_13():
    max_length, cache = 20, 8

    def by_hand(length):
        if length <= max_length - cache:
            return 0.0
        if length <= max_length:
            return ((max_length - cache) - length) / cache
        return -1.0

    lengths = list(range(25))
    got = overlong_penalty(lengths, max_length, cache, factor=0.5)
    np.testing.assert_allclose(got, [0.5 * by_hand(length) for length in lengths], atol=1e-15)
    assert got[[12, 13, 20, 24]].tolist() == [0.0, -0.0625, -0.5, -0.5]
    assert overlong_penalty([20], 20, 20).tolist() == [-1.0]


@pytest.mark.parametrize("tokens", [0, -1, 21])
def test_an_overlong_zone_fits_the_completion(tokens):
    with pytest.raises(ValueError, match=f"overlong_tokens is {tokens}; expected 1 to max_new_tokens=20"):
        overlong_penalty([3], 20, tokens)


def test_rewards_are_shifted_then_scaled_then_cut():
    got = shape_rewards([0.0, 1.0, -3.0, 9.0, math.nan], bias=-0.5, scaling=2.0, clip=5.0)
    assert got[:4].tolist() == [-1.0, 1.0, -5.0, 5.0]
    assert math.isnan(got[4])
    assert shape_rewards([100.0]).tolist() == [100.0]
