"""How many tokens a step drafts: as many as pay by the measured shares of right tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from areno.engine.decoder.drafts import MAX_SEQUENCES, DraftLength, StepCosts, _SlotTexts
from areno.engine.decoder.verification import DRAFT_LENGTHS

COSTS = StepCosts(fixed=400, verification=100, most_rows=1024)
EVEN = np.ones(1)


def lengths(share: float, n_rows: int, costs: StepCosts = COSTS, n_steps: int = 400) -> list[int]:
    """How many tokens each step drafts, if a share of the drafted tokens is right."""
    rng, decides, found = random.Random(0), DraftLength(costs), list[int]()
    for _ in range(n_steps):
        n = decides.of(n_rows, is_prepared=True)
        found.append(n)
        right = np.array([[rng.random() < share for _ in range(n)] for _ in range(n_rows)]).reshape(n_rows, n)
        right = np.logical_and.accumulate(right, axis=1)
        if n:
            decides.count(np.array([n_rows, *right.sum(0)[:-1]]), right.sum(0), EVEN)
    return found


def test_as_many_tokens_are_drafted_as_pay() -> None:
    assert set(lengths(0.9, 8)[10:]) == {max(DRAFT_LENGTHS)}
    assert lengths(0.05, 8)[50:].count(0) > 330
    assert 0 < 400 - lengths(0.05, 256).count(0) < 12  # tried now and then
    assert set(lengths(0.9, 200)[10:]) <= {1, 3}  # more rows than a step may have
    assert lengths(0.9, MAX_SEQUENCES + 1) == [0] * 400
    assert lengths(1.0, 0) == [0] * 400


def test_drafts_are_tried_again_when_the_batch_has_shrunk_or_the_text_begins_to_repeat() -> None:
    decides = DraftLength(COSTS)
    decides.count(np.array([400.0, 0]), np.array([8.0, 0]), EVEN)
    assert not any(decides.of(200, is_prepared=True) for _ in range(200))
    drafted: list[int] = []
    for _ in range(2500):
        drafted.append(decides.of(64, is_prepared=True))
        decides.count(*[np.full(drafted[-1], 64.0)] * 2, EVEN)
    assert drafted[-1] == max(DRAFT_LENGTHS)


def test_a_rollout_after_another_is_tried_as_in_a_resumed_run() -> None:
    drafted: list[list[int]] = []
    decides = DraftLength(COSTS)
    for _ in range(2):
        decides.begin(COSTS, kept=0.0)
        decides.count(np.array([20.0]), np.array([0.0]), EVEN)
        drafted.append([decides.of(200, is_prepared=True) for _ in range(300)])
    assert drafted[0] == drafted[1]
    assert sum(map(bool, drafted[0])) > 2


def test_a_quarter_of_the_sequences_does_not_slow_down_the_others() -> None:
    costs = StepCosts(fixed=240, verification=15, most_rows=512)  # of 4B on a GPU
    right_B, texts, slots_B = np.arange(64) % 4 == 0, _SlotTexts(100), np.arange(20, 84)
    decides, n_drafted = DraftLength(costs), 0
    for _ in range(400):
        n = decides.of(64, is_prepared=True)
        if n:
            right_BJ = np.repeat(right_B[:, None], n, axis=1)
            texts.n_steps[slots_B] += 1
            texts.n_right[slots_B] += right_BJ.sum(1)
            right_J = right_BJ.sum(0)
            decides.count(np.array([64, *right_J[:-1]]), right_J, texts.ease(slots_B))
            n_drafted += 1
    assert 0 < n_drafted < 20
    alike = DraftLength(costs)
    alike.count(np.full(3, 400.0), np.full(3, 100.0), EVEN)  # a quarter of the tokens of each sequence
    assert alike.of(8, is_prepared=True)
    assert texts.ease(slots_B).mean() == pytest.approx(1)
    assert texts.ease(np.arange(20)).tolist() == [1.0] * 20
