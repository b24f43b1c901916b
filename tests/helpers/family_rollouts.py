"""Decode prompts with a model of any family, and compute the log-probabilities of the result in one pass."""

from __future__ import annotations

from typing import Any

import torch

from areno.engine.decoder.decoder import Decoder
from areno.models.transformer import Transformer
from areno.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.helpers.new_decoder import new_decoder
from tests.helpers.two_ranks import packed

Outputs = dict[tuple[int, int], GenerationOutput]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(4, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


REQUESTS = [
    GenerationRequest(
        request_id=number,
        prompt=prompt(number, length),
        n_samples=n_samples,
        seed=number,
        params=SamplingParams(max_new_tokens=n_new, ignore_eos=True),
    )
    for number, (length, n_samples, n_new) in enumerate([(13, 3, 10), (30, 2, 12), (1, 1, 16), (8, 2, 6)])
]


def decode(
    model: Transformer, requests: list[GenerationRequest] = REQUESTS, *, drafter: Any = None, **settings: Any
) -> tuple[Outputs, Decoder]:
    decoder = new_decoder(model, keeps_routes=model.config.experts is not None, **settings)
    decoder.drafter = drafter
    for request in requests:
        decoder.submit(request)
    outputs: Outputs = {}
    while decoder.has_work:
        outputs |= {(output.request_id, output.sample): output for output in decoder.step()}
    return outputs, decoder


def trained_logprobs(model: Transformer, outputs: Outputs) -> list[torch.Tensor]:
    """Of the completions, by one pass over all rows."""
    n_prompt = {request.request_id: len(request.prompt) for request in REQUESTS}
    rows = [torch.tensor(REQUESTS[request_id].prompt + out.tokens) for (request_id, _), out in outputs.items()]
    with torch.no_grad():
        logprobs = model.logits(model(*packed(rows))).log_softmax(-1).split([len(row) for row in rows])
    return [
        row_logprobs[n_prompt[key[0]] - 1 : -1].gather(1, row[n_prompt[key[0]] :, None]).squeeze(1)
        for key, row, row_logprobs in zip(outputs, rows, logprobs, strict=True)
    ]
