"""How many tokens a step drafts: as many as pay by the measured shares of right tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from areno.engine.decoder.draft_length import MAX_SEQUENCES, DraftLength, StepCosts
from areno.engine.decoder.draft_verification import DRAFT_LENGTHS
from areno.engine.decoder.ngram_drafts import NgramDrafter, _SlotTexts
from areno.engine.decoder.slots import SlotTable
from tests.helpers.tiny_decoder import make_decoder, model, request, run

COSTS = StepCosts(fixed=400, verification=100, most_rows=1024)
EVEN = np.ones(1)


def lengths(share: float, n_rows: int, costs: StepCosts = COSTS, n_steps: int = 400) -> list[int]:
    """How many tokens each step drafts, if a share of the drafted tokens is right."""
    rng, decides, found = random.Random(0), DraftLength(costs), list[int]()
    for _ in range(n_steps):
        n = decides.next_length(n_rows, EVEN, is_prepared=True)
        found.append(n)
        right = np.array([[rng.random() < share for _ in range(n)] for _ in range(n_rows)]).reshape(n_rows, n)
        right = np.logical_and.accumulate(right, axis=1)
        if n:
            decides.count_accepted_by_position(np.array([n_rows, *right.sum(0)[:-1]]), right.sum(0))
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
    decides.count_accepted_by_position(np.array([400.0, 0]), np.array([8.0, 0]))
    assert not any(decides.next_length(200, EVEN, is_prepared=True) for _ in range(200))
    drafted: list[int] = []
    for _ in range(2500):
        drafted.append(decides.next_length(64, EVEN, is_prepared=True))
        decides.count_accepted_by_position(*[np.full(drafted[-1], 64.0)] * 2)
    assert drafted[-1] == max(DRAFT_LENGTHS)


def test_a_rollout_after_another_is_tried_as_in_a_resumed_run() -> None:
    drafted: list[list[int]] = []
    decides = DraftLength(COSTS)
    for _ in range(2):
        decides.begin_rollout(COSTS, kept=0.0)
        decides.count_accepted_by_position(np.array([20.0]), np.array([0.0]))
        drafted.append([decides.next_length(200, EVEN, is_prepared=True) for _ in range(300)])
    assert drafted[0] == drafted[1]
    assert sum(map(bool, drafted[0])) > 2


class Mixed:
    """A full batch, in which the drafts of some sequences are always right and those of the others always wrong."""

    def __init__(self, n_rows: int, costs: StepCosts):
        self.slots, self.decides, self.n_rows = SlotTable(n_rows), DraftLength(costs), n_rows
        self.texts = _SlotTexts(self.slots)
        self.replace(np.zeros(n_rows, dtype=bool))

    def replace(self, is_right_B: np.ndarray) -> None:
        """Other sequences take the slots. The drafts of those in the mask are right."""
        self.slots.owner += 1 + self.n_rows
        self.is_right_B = is_right_B

    def n_drafting(self, n_steps: int, *, knows_rows: bool = True) -> int:
        """How many of the next steps draft."""
        found = 0
        for _ in range(n_steps):
            acceptance_B = self.texts.relative_acceptance() if knows_rows else EVEN
            if n := self.decides.next_length(self.n_rows, acceptance_B, is_prepared=True):
                right_BJ = np.repeat(self.is_right_B[:, None], n, axis=1)
                began_B = self.texts.owner != self.slots.owner
                self.texts.owner[began_B] = self.slots.owner[began_B]
                self.texts.n_steps[began_B] = self.texts.n_right[began_B] = 0
                self.texts.count_accepted(np.arange(self.n_rows), right_BJ.sum(1))
                self.decides.count_accepted_by_position(np.array([self.n_rows, *right_BJ.sum(0)[:-1]]), right_BJ.sum(0))
                found += 1
        return found


OF_4B = StepCosts(fixed=240, verification=15, most_rows=512)  # on a GPU


@pytest.mark.parametrize(("n_rows", "one_in"), [(64, 3), (32, 4)])
def test_few_sequences_with_right_drafts_do_not_slow_down_the_others(n_rows: int, one_in: int) -> None:
    mixed = Mixed(n_rows, OF_4B)
    mixed.replace(np.arange(n_rows) % one_in == 0)
    assert 0 < mixed.n_drafting(400) < 25
    mixed.replace(np.ones(n_rows, dtype=bool))  # what is known of the old sequences says nothing about the new ones
    assert (mixed.texts.relative_acceptance() == 1).all()
    assert mixed.n_drafting(100) == 100
    plain = Mixed(n_rows, OF_4B)
    plain.replace(np.arange(n_rows) % one_in == 0)
    assert plain.n_drafting(400, knows_rows=False) == 400


@pytest.mark.parametrize(("fixed", "expected"), [(500, 1), (120, 0)])
def test_a_sequence_gains_at_most_the_drafted_tokens(fixed: float, expected: int) -> None:
    """With fixed = 120, a step takes 1.45 times as long with drafts. A token takes 0.70 steps, and would take 0.63."""
    costs = StepCosts(fixed=fixed, verification=0, most_rows=200)  # for 100 sequences one drafted token
    decides = DraftLength(costs)
    decides.count_accepted_by_position(np.array([500.0]), np.array([500.0]))
    assert decides.next_length(100, np.array([1.9, 0.1]), is_prepared=True) == expected


def test_the_counts_of_a_sequence_follow_its_text() -> None:
    texts = _SlotTexts(slots := SlotTable(2))
    slots.owner[:] = texts.owner[:] = 1, 2
    both = np.arange(2)
    for _ in range(1000):
        texts.count_accepted(both, np.array([7, 0]))
    assert texts.relative_acceptance() == pytest.approx([2, 0], abs=0.25)
    for _ in range(300):
        texts.count_accepted(both, np.array([3, 3]))
    assert texts.relative_acceptance() == pytest.approx([1, 1], abs=0.05)


@pytest.mark.parametrize("table_bits", [2, 12])
def test_wrong_drafts_that_the_host_reads_pause(table_bits: int) -> None:
    """With a tiny table, there are mostly no drafts at all."""
    drafter = NgramDrafter(torch.device("cpu"), table_bits=table_bits)
    drafter.begin_rollout(StepCosts(fixed=40, verification=10, most_rows=200))
    decoder = make_decoder(model(), drafter=drafter)
    proposes, n_proposed = drafter.propose, list[int]()
    drafter.propose = lambda sequences: n_proposed.append(1) or proposes(sequences)  # type: ignore[method-assign]
    decoder.submit(request(1, 9, max_new_tokens=80, n_samples=4, frequency_penalty=0.1))
    run(decoder)
    assert decoder.stats.decode_steps > 60
    assert 0 < len(n_proposed) < 15


@pytest.mark.parametrize("penalty", [0.0, 1e-6])  # drafts on the device, and on the host
def test_the_acceptance_of_each_sequence_is_measured(penalty: float) -> None:
    drafter = NgramDrafter(torch.device("cpu"), table_bits=12)
    drafter.begin_rollout(StepCosts(fixed=10_000, verification=1, most_rows=200))
    found: list[list[float]] = []
    decides = drafter.length.next_length

    def recorded(n_running: int, relative_acceptance_B: Any, *, is_prepared: bool) -> int:
        found.append(relative_acceptance_B.tolist())
        return decides(n_running, relative_acceptance_B, is_prepared=is_prepared)

    drafter.length.next_length = recorded  # type: ignore[method-assign]
    decoder = make_decoder(model(), drafter=drafter)
    items = [
        request(1, 9, max_new_tokens=60, greedy=True, frequency_penalty=penalty),  # repeats itself
        request(2, 9, max_new_tokens=60, n_samples=3, temperature=5.0, frequency_penalty=penalty),
    ]
    for item in items:
        decoder.submit(item)
    run(decoder)
    full = [each for each in found if len(each) == 4]
    assert len(full) > 10
    assert full[-1][0] > 1.5
    assert max(full[-1][1:]) < 1
