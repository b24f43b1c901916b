"""Speculation in the engine: rollouts with drafts have the samples of rollouts without, on any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areno.config.rollout import DecoderConfig
from areno.engine.engine import Engine
from areno.types import GenerationOutput, GenerationRequest
from tests.helpers.tiny_engine import ROLLOUT, model_folder, request, spec

REQUESTS = [
    request(0, n_samples=3, max_new_tokens=40),
    request(1, length=30, temperature=0.7, top_k=20, max_new_tokens=60),
    request(2, n_samples=2, greedy=True, ignore_eos=True, max_new_tokens=50),
    request(4, n_samples=4, temperature=0.1, ignore_eos=True, max_new_tokens=60),
    request(3, n_samples=4, top_p=0.8, max_new_tokens=30, frequency_penalty=0.3),
]
Found = list[tuple[list[int], list[float], list[int]]]


def record(outputs: dict[int, list[GenerationOutput]]) -> Found:
    return [(each.tokens, each.logprobs, each.versions) for _, of in sorted(outputs.items()) for each in of]


def rollouts(engine: Engine, speculation: Any, requests: list[GenerationRequest] = REQUESTS) -> tuple[Found, int, int]:
    """Two rollouts of the same requests."""
    found: Found = []
    for _ in range(2):
        engine.begin_rollout(replace(ROLLOUT, decoder=DecoderConfig(speculation=speculation)))
        found += record(engine.generate(requests))
        stats, counts = engine.rollout_stats(), engine.draft_counts()
        engine.end_rollout()
    assert counts.drafted == sum(one.drafted_tokens for one in stats)
    assert counts.acceptance_rate == counts.accepted / max(1, counts.drafted)
    assert counts.drafted_step_share == counts.draft_steps / counts.steps
    assert (counts.draft_steps > 0) == (counts.drafted > 0)
    return found, counts.drafted, counts.accepted


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one"),
        pytest.param({"devices": 2, "tp_size": 2}, id="tp", marks=pytest.mark.slow),
        pytest.param({"devices": 2}, id="dp", marks=pytest.mark.slow),
    ],
)
def test_samples_with_drafts_are_those_without(layout: dict[str, Any], tmp_path: Path) -> None:
    model_folder(tmp_path)
    with Engine(spec(tmp_path, exact=True, **layout), *(["spawn"] if layout else [])) as engine:
        expected, drafted, _ = rollouts(engine, "off")
        assert drafted == 0
        got, drafted, accepted = rollouts(engine, "on")
        assert drafted > 20
        assert accepted > 10
        assert got == expected


@pytest.mark.slow
def test_a_held_engine_does_not_draft(tmp_path: Path) -> None:
    model_folder(tmp_path)
    with Engine(spec(tmp_path)) as engine:
        steps: list[int] = []
        for speculation in ("off", "on", "on"):
            engine.begin_rollout(replace(ROLLOUT, decoder=DecoderConfig(speculation=speculation)))
            engine.hold_decoding()
            engine.submit(REQUESTS)
            steps.append(0)
            outputs: list[GenerationOutput] = []
            while len(outputs) < 10:
                more, stats = engine.advance(10 - len(outputs), 1)
                outputs += more
                steps[-1] += 1
            assert engine.draft_counts().drafted == sum(one.drafted_tokens for one in stats) == 0
            engine.end_rollout()
        assert steps[0] == steps[1] == steps[2]
