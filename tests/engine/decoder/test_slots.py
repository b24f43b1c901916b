"""Numbers of the running sequences as arrays: the same completions, and work that does not grow with the batch."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from areno.engine.decoder import decoder as decoder_module
from areno.engine.decoder import slots
from areno.engine.decoder.slots import SlotTable
from tests.helpers.tiny_decoder import MIXED, assert_same, generate, make_decoder, mixed_outputs, request, run


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_sequences_take_over_their_tokens_when_the_arrays_are_full(
    monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    expected = mixed_outputs()
    monkeypatch.setattr(slots, "STAGED", 3)
    monkeypatch.setattr(decoder_module, "STAGED", 3)
    assert_same(generate(*MIXED, block_size=64, runs_ahead=runs_ahead), expected)


def n_calls(n_rows: int) -> int:
    """The number of Python functions that a decoding step calls in which nothing happens to any sequence."""
    decoder = make_decoder(max_running=n_rows, n_blocks=2 * n_rows, block_size=64)
    for number in range(n_rows // 8):
        decoder.submit(request(number, n_samples=8))
    for _ in range(4):
        assert not decoder.step()
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert not decoder.step()
    finally:
        sys.setprofile(None)
    assert decoder.stats.running == n_rows
    run(decoder)
    return calls


def test_a_step_calls_no_function_for_a_row() -> None:
    assert abs(n_calls(256) - n_calls(64)) < 32


def test_a_token_in_flight_is_not_given_to_the_next_sequence_of_the_slot() -> None:
    table = SlotTable(2)
    table.occupy(1, frozenset({7}))
    first = table.owner[1]
    table.owner[1] = 0
    table.occupy(1, frozenset({8, 9}))
    assert table.owner[1] not in (0, first)
    both, tokens = np.array([0, 1]), np.array([7, 9])
    assert table.has_stopped(both, tokens).tolist() == [False, True]
    table.stage(both, tokens, np.array([-1.0, -2.0]), 3)
    assert [each.tolist() for each in table.take_staged([1])[0]] == [[9], [-2.0], [3]]
    assert [each.tolist() for each in table.take_staged([1])[0]] == [[], [], []]
    assert table.n_new.tolist() == [1, 1]
