"""Which samples of a step show best what a warning is about."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from areno.tracking.telling_samples import N_TELLING, telling_samples
from areno.types import RewardOutcome, ScoredSample
from tests.helpers.samples import sample


def batch(**of_sample: dict[int, Any]) -> list[ScoredSample]:
    """Twelve equal samples in groups of four. `of_sample` has the attributes of some of them."""
    found = [sample(2, [-0.5, -0.5], 0.0) for _ in range(12)]
    for index, each in enumerate(found):
        each.group = index // 4
        each.advantages, each.train_logprobs = np.array([0.1, 0.1]), np.array([-0.5, -0.5])
        each.sequence.resp_versions = [7, 7]
    for name, values in of_sample.items():
        for index, value in values.items():
            where = found[index] if hasattr(found[index], name) else found[index].sequence
            setattr(where, name, value)
    return found


LONG, SHORT = [1] * 9, [1]


@pytest.mark.parametrize(
    ("kind", "changed", "first"),
    [
        ("longer", {"resp_tokens": {9: LONG}}, 9),
        ("truncated", {"resp_tokens": {9: LONG}}, 9),
        ("shorter", {"resp_tokens": {3: SHORT}}, 3),
        ("kl", {"advantages": {5: np.array([0.1, -4.0])}}, 5),
        ("kl", {"resp_logprobs": {6: [-9.0, -9.0]}}, 6),
        ("skipped", {"advantages": {5: np.array([0.1, math.nan])}}, 5),
        ("stale", {"train_logprobs": {8: np.array([-0.5, -3.0])}}, 8),
        ("logprobs", {"train_logprobs": {8: np.array([math.nan, -3.0]), 1: None}}, 8),
        ("aged", {"resp_versions": {2: [4, 7]}}, 2),
        ("not_finite", {"outcome": {7: RewardOutcome(None, "not_finite")}}, 7),
        ("unrewarded", {"outcome": {7: RewardOutcome(None, "timeout")}}, 7),
        ("entropy", {"resp_logprobs": {4: [-1e-4] * 2, 5: [-1e-3] * 2}, "outcome": {4: RewardOutcome(1.0)}}, 5),
        ("another", {}, 0),
    ],
)
def test_the_most_telling_sample_is_first(kind: str, changed: dict[str, Any], first: int) -> None:
    found = telling_samples(kind, batch(**changed))
    assert found[0] == first
    assert len(set(found)) == N_TELLING


def test_equal_rewards_are_shown_by_samples_of_one_prompt() -> None:
    samples = batch()
    assert {samples[index].group for index in telling_samples("flat", samples)} == {0}


def test_a_model_that_is_pleased_is_shown_by_what_only_the_model_likes() -> None:
    samples = batch()
    for index, each in enumerate(samples[:11]):
        liked, right = index in (2, 5), index in (5, 7)
        each.outcome = RewardOutcome(1.0, parts={"model": 40.0 + 3 * liked, "rule": float(right)})
    found = telling_samples("hacked", samples, ("model", "rule"))
    assert found[0] == 2
    assert not {7, 11} & set(found)


@pytest.mark.parametrize("kind", ["longer", "flat", "entropy", "hacked", "kl", "stale", "aged"])
def test_samples_without_tokens_or_rewards(kind: str) -> None:
    failed = sample(0, [], None, status="agent_error")
    assert telling_samples(kind, [failed], ("model", "rule")) in ([0], [])
