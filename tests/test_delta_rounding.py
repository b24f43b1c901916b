"""What float32 costs in models with the gated delta rule: no more here than in transformers, against float64.

A bar for the difference itself would say little. The norm behind the rule divides by what a state gives for a token,
which may be next to nothing, so such a model multiplies what is rounded before it, up to 1,000 times in each layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_shape
import torch
from in_float64 import InFloat64
from torch import Tensor
from two_ranks import load, packed

from areno.engine.decoder.decoder import Decoder
from areno.types import GenerationRequest, SamplingParams
from tests.family_cases import CASES, SHAPE


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def logprobs(logits_BNV: Tensor, rows_BN: Tensor) -> Tensor:
    """Of each row's tokens but the first."""
    return logits_BNV[:, :-1].double().log_softmax(-1).gather(-1, rows_BN[:, 1:, None]).squeeze(-1)


def test_rows_of_hundreds_of_tokens_are_as_exact_as_with_transformers(tmp_path: Path) -> None:
    """Training against their chunks, rollouts against their steps with a cache, and the one against the other."""
    kind, extra = CASES["qwen3.5"]
    theirs: Any = tiny_shape.random_model(kind(**{**SHAPE, **extra, "max_position_embeddings": 512}), tmp_path)
    model = load(tmp_path)
    decoder = Decoder(model, n_blocks=200, block_size=4, max_running=2, max_prefill_tokens=256, eos_token_ids=[])
    params = SamplingParams(max_new_tokens=280, ignore_eos=True)
    prompt = list(range(4, 24))
    decoder.submit(GenerationRequest(request_id=0, prompt=prompt, n_samples=2, seed=0, params=params))
    outputs = []
    while decoder.has_work:
        outputs += decoder.step()
    rows = torch.tensor([[*prompt, *out.tokens] for out in outputs])
    with torch.no_grad():
        trained = logprobs(model.logits(model(*packed(list(rows)))).view(2, 300, -1), rows)
        in_chunks = logprobs(theirs(rows).logits, rows)
        cache, steps = None, []
        for token_B1 in rows.split(1, dim=1):
            step = theirs(token_B1, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
        in_steps = logprobs(torch.cat(steps, dim=1), rows)
        with InFloat64():
            exact = logprobs(theirs.double()(rows).logits, rows)
    sampled = torch.tensor([out.logprobs for out in outputs], dtype=torch.float64)
    trained, in_chunks, in_steps, exact = (each[:, len(prompt) - 1 :] for each in (trained, in_chunks, in_steps, exact))
    assert 0 < rms(trained - exact) < 2 * rms(in_chunks - exact)
    assert 0 < rms(sampled - exact) < 2 * rms(in_steps - exact)
    assert rms(trained - sampled) < 2 * rms(in_chunks - in_steps)
