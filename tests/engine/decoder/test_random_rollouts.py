"""Random requests in a small cache, with prompts that share beginnings, aborts and new weights on the way: each sample
is that of a decoder with room for all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.cost.kv_layout import KVLayout
from areno.engine.decoder.decoder import Decoder
from areno.models.transformer import Transformer
from areno.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.helpers.family_cases import random_model
from tests.helpers.new_decoder import new_decoder
from tests.helpers.tiny_decoder import assert_all_blocks_are_free
from tests.helpers.two_ranks import load

Outputs = dict[tuple[int, int], GenerationOutput]


def make(model: Transformer, **settings: Any) -> Decoder:
    options = {"n_blocks": 400, "max_running": 32, "max_prefill_tokens": 512, "eos_token_ids": [3]}
    return new_decoder(model, **{**options, **settings})


def random_requests(rng: random.Random) -> list[GenerationRequest]:
    requests: list[GenerationRequest] = []
    for number in range(rng.randrange(4, 8)):
        prompt = [rng.randrange(4, 101) for _ in range(rng.randrange(1, 50))]
        if requests and rng.random() < 0.4:
            earlier = rng.choice(requests).prompt
            prompt = (earlier[: rng.randrange(1, len(earlier) + 1)] + prompt)[:60]
        params = SamplingParams(max_new_tokens=rng.randrange(1, 30), ignore_eos=rng.random() < 0.5)
        requests.append(
            GenerationRequest(
                request_id=number,
                prompt=prompt,
                n_samples=rng.randrange(1, 5),
                seed=number,
                params=params,
                prompt_logprobs=rng.random() < 0.3,
            )
        )
    return requests


def smallest(model: Transformer, block_size: int, n_tokens: int) -> int:
    """Blocks of the smallest cache with room for one sequence of so many tokens."""
    context = model.config.max_position_embeddings
    layout = KVLayout.from_config(model.config, block_size, context)
    return next(n for n in range(1, 400) if layout.max_sequence_tokens(layout.pool_blocks(n), context) >= n_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 9))])
@pytest.mark.parametrize("case", [pytest.param("gemma3-tied", marks=pytest.mark.slow), "mistral-window", "qwen3.5"])
def test_samples_are_those_of_a_decoder_with_room_for_all(case: str, seed: int, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    model, rng = load(tmp_path), random.Random(seed)
    requests = random_requests(rng)
    roomy = make(model)
    expected: Outputs = {}
    for request in requests:
        roomy.submit(request)
    while roomy.has_work:
        expected |= {(output.request_id, output.sample): output for output in roomy.step()}

    size = rng.choice([2, 4, 8])
    longest = max(len(request.prompt) + request.params.max_new_tokens - 1 for request in requests)
    decoder = make(
        model,
        block_size=size,
        n_blocks=smallest(model, size, longest),
        max_running=rng.randrange(3, 9),
        max_prefill_tokens=rng.choice([3, 7, 16]),
    )
    waiting, aborted = list(requests), set[int]()
    found: Outputs = {}
    while waiting or decoder.has_work:
        if waiting and rng.random() < 0.7:
            decoder.submit(waiting.pop(0))
        if rng.random() < 0.02:
            decoder.reset_cache()
        if rng.random() < 0.01:
            aborted.add(number := rng.choice(list(decoder.unfinished) or [-1]))
            decoder.abort(number)
        found |= {(output.request_id, output.sample): output for output in decoder.step()}

    assert decoder.stats.preemptions > 0
    assert_all_blocks_are_free(decoder)
    assert found.keys() == expected.keys()
    for key, output in found.items():
        other, n = expected[key], len(output.tokens)
        assert output.tokens == other.tokens[:n]
        torch.testing.assert_close(torch.tensor(output.logprobs), torch.tensor(other.logprobs[:n]), atol=1e-3, rtol=0)
        if key[0] not in aborted:
            assert (n, output.finish_reason) == (len(other.tokens), other.finish_reason)
            scores, others = ([each for each, _ in one.prompt_logprobs] for one in (output, other))
            assert scores == pytest.approx(others, abs=1e-3)
