"""Many requests at once, for a caller who waits until the last sample is there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from areno.engine.spec import RolloutStats
from areno.errors import non_finite_logits
from areno.types import GenerationOutput, GenerationRequest

OnProgress = Callable[[list[GenerationOutput], list[RolloutStats]], None]


class Sampler(Protocol):
    """What is asked here: an `Engine`."""

    def submit(self, requests: Iterable[GenerationRequest]) -> None: ...
    def poll(self, timeout: float) -> list[GenerationOutput]: ...
    def rollout_stats(self) -> list[RolloutStats]: ...


def wait_for_all(
    engine: Sampler, requests: Sequence[GenerationRequest], on_progress: OnProgress | None, at_once: int | None
) -> dict[int, list[GenerationOutput]]:
    """Sample all requests, which begin in this order, and return their finished samples in order.

    Raises EngineError where the model gives a sample no finite numbers.
    """
    waiting = iter(requests)
    engine.submit(itertools.islice(waiting, at_once))
    n_samples = {request.request_id: request.n_samples for request in requests}
    done: dict[int, list[GenerationOutput]] = {request.request_id: [] for request in requests}
    left = sum(request.n_samples for request in requests)
    while left:
        outputs = [output for output in engine.poll(0.5) if output.finish_reason is not None]
        for output in outputs:
            if output.finish_reason == "error":  # with valid settings it can only be the model
                raise non_finite_logits()
            done[output.request_id].append(output)
        left -= len(outputs)
        if at_once is not None:
            ended = [id for id in {output.request_id for output in outputs} if len(done[id]) == n_samples[id]]
            engine.submit(itertools.islice(waiting, len(ended)))
        if on_progress is not None:
            on_progress(outputs, engine.rollout_stats())
    for outputs in done.values():
        outputs.sort(key=lambda output: output.sample)
    return done
