"""Samples that are interrupted and continue in a later rollout: no bit depends on where they were interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areno.engine.decoder.block_manager import BlockManager
from areno.engine.engine import Engine
from areno.engine.requests import RequestRefused
from areno.types import BegunCompletion
from tests.helpers.parked import ROOMY, in_pieces, largest_difference, told, whole
from tests.helpers.tiny_engine import model_folder, request, spec

REQUESTS = [
    request(0, n_samples=3, max_new_tokens=90),
    request(1, length=40, temperature=0.7, top_k=20, max_new_tokens=40),
    request(2, n_samples=2, greedy=True, ignore_eos=True, max_new_tokens=75),
    request(3, n_samples=4, top_p=0.8, frequency_penalty=0.4, max_new_tokens=30),
    request(4, n_samples=2, length=70, min_new_tokens=9, max_new_tokens=130, stop_token_ids=[7, 8]),
    request(5, length=3, ignore_eos=True, max_new_tokens=64),
    request(6, n_samples=2, max_new_tokens=50, top_logprobs=3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(spec(folder, exact=True), "inline") as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("n_steps", [1, 7, 64])
def test_interrupted_samples_have_the_bits_of_others(engine: Engine, n_steps: int) -> None:
    expected = whole(engine, ROOMY, REQUESTS)
    found = in_pieces(engine, ROOMY, REQUESTS, n_steps)
    assert {key: told(output) for key, output in found.items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"devices": 2}, {"devices": 2, "tp_size": 2}])
def test_in_processes_too(folder: Path, layout: dict[str, int]) -> None:
    with Engine(spec(folder, exact=True, **layout), "spawn") as engine:
        expected = whole(engine, ROOMY, REQUESTS)
        assert {key: told(output) for key, output in in_pieces(engine, ROOMY, REQUESTS, 7).items()} == expected
        assert whole(engine, ROOMY, REQUESTS) == expected  # a rollout that is not held


@pytest.mark.slow
def test_advance_stops_when_enough_have_finished(engine: Engine) -> None:
    engine.begin_rollout(ROOMY)
    engine.hold_decoding()
    engine.submit([request(i, max_new_tokens=5 * (i + 1), ignore_eos=True) for i in range(4)])
    assert engine.poll(0.01) == []  # held: nothing runs by itself
    first, stats = engine.advance(1, 1000)
    assert [output.request_id for output in first] == [0]
    assert stats[0].running == 3
    assert engine.advance(1, 4)[0] == []
    assert [output.request_id for output in engine.advance(2, 1000)[0]] == [1, 2]
    [last] = engine.park()
    assert (last.request_id, last.finish_reason, len(last.tokens)) == (3, None, 15)
    engine.end_rollout()
    assert len(whole(engine, ROOMY, REQUESTS[:1])) == 3


@pytest.mark.slow
def test_new_weights_go_on_as_if_all_tokens_before_were_theirs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(spec(folder, exact=True), "inline") as engine:
        assert largest_difference(engine) == 0.0
        # The keys and values of the old weights would be found again.
        monkeypatch.setattr(BlockManager, "reset", lambda self: None)
        assert largest_difference(engine) > 1e-4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n_samples": 2}, "continues one sample"),
        ({"begun": BegunCompletion([], [], [])}, "1 to 11 are possible"),
        ({"begun": BegunCompletion([2] * 12, [-1.0] * 12, [0] * 12)}, "1 to 11 are possible"),
        ({"begun": BegunCompletion([2, 3], [-1.0], [0, 0])}, "one for each token"),
        ({"begun": BegunCompletion([64], [-1.0], [0])}, "token id 64"),
        ({"stream": True}, "partial outputs"),
        ({"top_logprobs": 2}, "top log-probabilities of 0"),
        ({"raw_logprobs": True}, "raw log-probabilities"),
    ],
)
def test_what_cannot_continue_is_refused(engine: Engine, more: dict[str, Any], words: str) -> None:
    given = request(1)
    for name, value in {"begun": BegunCompletion([2, 3], [-1.0, -1.0], [0, 0]), **more}.items():
        setattr(given, name, value)
    engine.begin_rollout(ROOMY)
    with pytest.raises(RequestRefused, match=words):
        engine.submit([given])
    engine.end_rollout()
