"""Rollouts whose samples are interrupted after some steps, and continue in the next rollout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from areno.engine.engine import Engine
from areno.engine.requests import continuation_requests
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationOutput, GenerationRequest


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
