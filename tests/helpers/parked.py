"""Rollouts whose samples are interrupted after some steps, and continue in the next rollout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.engine.engine import Engine
from areno.engine.requests import continuation_requests
from areno.loss_fns.grpo import grpo_loss_fn
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, GenerationRequest
from tests.helpers.tiny_engine import request, train_rows

ROOMY = RolloutSpec(max_running=16, max_len=400)
MANY = 1 << 40


def told(output: GenerationOutput) -> tuple[Any, ...]:
    return output.tokens, output.logprobs, output.finish_reason, output.top_logprobs


def whole(
    engine: Engine, rollout: RolloutSpec, requests: Sequence[GenerationRequest]
) -> dict[tuple[int, int], tuple[Any, ...]]:
    """What the requests draw in one rollout."""
    engine.begin_rollout(rollout)
    outputs = engine.generate(list(requests))
    engine.end_rollout()
    return {(output.request_id, output.sample): told(output) for each in outputs.values() for output in each}


def in_pieces(
    engine: Engine, rollout: RolloutSpec, requests: Sequence[GenerationRequest], n_steps: int, between: Any = None
) -> dict[tuple[int, int], GenerationOutput]:
    """What the requests draw if a rollout ends after every `n_steps` steps. `between` is called after each."""
    ids, finished = itertools.count(), {}
    origin = {}
    due = []
    for each in requests:
        [one] = continuation_requests(each, [blank(each, k) for k in range(each.n_samples)], ids)
        origin[one.request_id] = each
        due.append(one)
    while due:
        engine.begin_rollout(rollout)
        engine.hold_decoding()
        engine.submit(due)
        outputs, _ = engine.advance(1 << 40, n_steps)
        outputs += engine.park()
        engine.end_rollout()
        parked: dict[int, list[GenerationOutput]] = {}
        for output in outputs:
            if output.finish_reason is None:
                parked.setdefault(origin[output.request_id].request_id, []).append(output)
            else:
                assert (origin[output.request_id].request_id, output.sample) not in finished
                finished[origin[output.request_id].request_id, output.sample] = output
        due = []
        for each in requests:
            rest = continuation_requests(each, parked.get(each.request_id, []), ids)
            origin |= {one.request_id: each for one in rest}
            due += rest
        if between is not None and due:
            between()
    return finished


def blank(request: GenerationRequest, sample: int) -> GenerationOutput:
    return GenerationOutput(
        request_id=request.request_id, sample=sample, tokens=[], logprobs=[], versions=[], finish_reason=None
    )


def largest_difference(engine: Engine, replays: bool = False) -> float:
    """Of the log-probabilities of tokens that the newest weights drew, to those of a training pass over whole rows.

    The samples are interrupted, and the weights updated, after 25 of 60 tokens. The pass uses the experts of the
    rollout if `replays`.
    """
    asked = [request(i, n_samples=2, length=300, max_new_tokens=60, ignore_eos=True) for i in range(3)]
    engine.begin_rollout(ROOMY)
    engine.hold_decoding()
    engine.submit(asked)
    engine.advance(MANY, 25)
    parked = engine.park()
    engine.end_rollout()
    assert {len(output.tokens) for output in parked} == {25}
    by_request: dict[int, list[GenerationOutput]] = {}
    for output in parked:
        by_request.setdefault(output.request_id, []).append(output)
    engine.train(train_rows(by_request, asked), grpo_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=700)))
    ids = itertools.count()
    rest = [one for each in asked for one in continuation_requests(each, by_request[each.request_id], ids)]
    engine.begin_rollout(ROOMY)
    outputs = [output for each in engine.generate(rest).values() for output in each]
    engine.end_rollout()
    new = engine.weights_version
    rows = [one.prompt + output.tokens for one, output in zip(rest, outputs, strict=True)]
    routes = [output.routes for output in outputs] if replays else None
    scored = engine.logprobs("actor", rows, SamplingConfig(), routes=routes)
    apart = []
    for output, row in zip(outputs, scored, strict=True):
        versions = np.array(output.versions)
        assert versions.tolist() == [new - 1] * 25 + [new] * 35
        apart.append(np.abs(np.array(output.logprobs) - np.asarray(row)[-60:])[versions == new].max())
    return float(max(apart))
