"""Changes of a series, in units of its own noise."""

from __future__ import annotations

import math
import random

import pytest

from areno.tracking.changes import FEWEST, LASTING, gain, is_jump, lasting_change, noise, without_trend


def normal(n: int, seed: int, trend: float = 0.0, spread: float = 1.0) -> list[float]:
    draw = random.Random(seed)
    return [trend * index + spread * draw.gauss(0, 1) for index in range(n)]


@pytest.mark.parametrize("trend", [0.0, 0.2, -0.2])
def test_noise_is_the_standard_deviation_around_a_trend(trend: float) -> None:
    values = normal(4000, seed=1, trend=trend)
    assert noise(values) == pytest.approx(1, rel=0.05)
    values[::50] = [1e6] * 80
    assert noise(values) == pytest.approx(1, rel=0.1), "outliers do not count"


def test_noise_alone_is_never_a_change() -> None:
    found = [0, 0]
    for seed in range(20):
        values = normal(500, seed)
        for end in range(len(values)):
            found[0] += lasting_change(values[:end]) != 0
            found[1] += is_jump([math.exp(value) for value in values[:end]], harmless=1e-9)
    assert found == [0, 0]


def test_a_lasting_change_has_a_size() -> None:
    before = normal(20, seed=3)
    change = lasting_change([*before, *[9.0] * LASTING])
    assert change == pytest.approx(9, abs=0.7)
    assert lasting_change([*before, *[-9.0] * LASTING]) == pytest.approx(-9, abs=0.7)
    assert lasting_change([*before, *[9.0] * (LASTING - 1), 0.0]) == 0, "it did not last"
    assert lasting_change([*before, 9.0, -9.0, *[9.0] * (LASTING - 2)]) == 0, "on both sides"
    assert lasting_change([*before, *[9.0] * LASTING], least_noise=4) == 0
    assert lasting_change([*before[:FEWEST], *[9.0] * LASTING]) != 0
    assert lasting_change([*before[: FEWEST - 1], *[9.0] * LASTING]) == 0
    assert gain([*before, *[9.0] * LASTING]) == pytest.approx(9, rel=0.5)


def test_a_trend_is_no_change() -> None:
    steady = normal(25, seed=5, trend=2.0)
    assert lasting_change(steady) != 0
    assert lasting_change(without_trend(steady)) == 0
    assert lasting_change(without_trend([*steady[:20], *[value + 9 for value in steady[20:]]])) > 5
    assert without_trend([1.0, 2.0]) == [1.0, 2.0]


def test_values_that_are_not_finite_are_no_change() -> None:
    for broken in (math.nan, math.inf):
        assert lasting_change([*[0.0] * 20, *[5.0] * (LASTING - 1), broken]) == 0
    assert not is_jump([0.1] * 20 + [math.nan], harmless=0.01)
    assert is_jump([0.1] * 20 + [math.inf], harmless=0.01)
    assert not is_jump([], harmless=0.01)


def test_a_series_without_noise() -> None:
    assert lasting_change([1.0] * 20 + [1.001] * LASTING) == pytest.approx(0.001)
    assert gain([1.0] * 20 + [1.001] * LASTING) == math.inf
    assert gain([1.0] * 25) == 0
    assert not is_jump([0.0] * 20 + [0.07], harmless=0.01), "a KL of 0.07 nats is 7 times as much as what is harmless"
    assert is_jump([0.0] * 20 + [0.08], harmless=0.01)
    assert not is_jump([0.0] * 18 + [0.08, 0.08], harmless=0.01), "the step before was the jump"
