"""Rollouts of models with experts, with and without their routes, beside training forward passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from areno.config.rollout import DecoderConfig
from areno.engine.engine import Engine
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationRequest, TrainSequence
from tests.helpers.tiny_engine import Outputs, logprobs_of, request, tokens_of, train_rows

REQUESTS = [
    request(0, n_samples=3),
    request(1, length=40),
    request(2, n_samples=2, length=33, greedy=True, ignore_eos=True),
    request(3, n_samples=4, max_new_tokens=70, ignore_eos=True),
]
ROOMY = RolloutSpec(max_running=16, max_len=96)
# Blocks for one long sample only, so others are preempted; prompts in pieces; few at a time.
TIGHT = RolloutSpec(max_running=8, max_len=96, decoder=DecoderConfig(max_kv_tokens=96, max_prefill_tokens=7))
NARROW = replace(ROOMY, max_running=2)


def sampled(engine: Engine, rollout: RolloutSpec = ROOMY, requests: Iterable[GenerationRequest] = REQUESTS) -> Outputs:
    engine.begin_rollout(rollout)
    outputs = engine.generate(list(requests))
    assert (engine.rollout_stats()[0].preemptions > 0) == (rollout is TIGHT)
    engine.end_rollout()
    return outputs


def rows_of(outputs: Outputs, with_routes: bool = True) -> list[TrainSequence]:
    rows = train_rows(outputs, REQUESTS)
    if with_routes:
        found = [output.routes for item in REQUESTS for output in outputs[item.request_id]]
        for row, routes in zip(rows, found, strict=True):
            row.routes = routes
    return rows


def apart(engine: Engine, rows: list[TrainSequence]) -> float:
    """The largest difference between the rows' log-probabilities and those of a training forward pass."""
    scored = engine.logprobs("actor", [list(row.tokens) for row in rows], routes=[row.routes for row in rows])
    pairs = zip(rows, scored, strict=True)
    diffs = [np.abs(np.asarray(row.logprobs) - new)[~np.asarray(row.prompt_mask)] for row, new in pairs]
    return float(np.concatenate(diffs).max())


def assert_same(found: Outputs, expected: Outputs) -> None:
    """Tokens, log-probabilities and experts, those of shared and recomputed tokens, too."""
    assert tokens_of(found) == tokens_of(expected)
    np.testing.assert_allclose(logprobs_of(found), logprobs_of(expected), atol=1e-4, rtol=0)
    for request_id, samples in found.items():
        for one, other in zip(samples, expected[request_id], strict=True):
            assert one.routes is not None
            assert np.array_equal(one.routes, other.routes)
