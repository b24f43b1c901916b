"""What float32 costs in models with the gated delta rule: no more here than in transformers, against float64.

A bar for the difference itself would say little. The norm behind the rule divides by what a state gives for a token,
which may be next to nothing, so such a model multiplies what is rounded before it, up to 1,000 times in each layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from areno.kernels.delta import RowChunks
from areno.kernels.delta.reference import chunked_delta
from areno.types import GenerationRequest, SamplingParams
from tests.helpers import tiny_shape
from tests.helpers.family_cases import CASES, SHAPE
from tests.helpers.in_float64 import InFloat64
from tests.helpers.new_decoder import new_decoder
from tests.helpers.two_ranks import load, packed


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("strength", [0.1, 3.0, 20.0])
def test_chunks_are_as_exact_as_single_steps(strength: float) -> None:
    """However strong the decay is: logarithms of up to 1,000 add up within a chunk where it is 20 for a token."""
    generator, n = torch.Generator().manual_seed(0), 300
    q, k = (F.normalize(torch.randn(n, 4, 8, generator=generator), dim=-1) for _ in range(2))
    v, beta = torch.randn(n, 4, 12, generator=generator), torch.rand(n, 4, generator=generator)
    decay = -strength * torch.rand(n, 4, generator=generator).square()
    given = [each[None] for each in (q, k, v, decay, beta)]
    with InFloat64():
        exact = torch_recurrent_gated_delta_rule(*(each.double() for each in given))[0][0]
        again = torch_chunk_gated_delta_rule(*(each.double() for each in given))[0][0]
    torch.testing.assert_close(again, exact, atol=1e-12, rtol=1e-9)
    chunks = RowChunks.from_starts([0, n], torch.device("cpu"))
    found = {
        "ours": chunked_delta(q * 8**-0.5, k, v, decay, beta, chunks)[0],
        "theirs": torch_recurrent_gated_delta_rule(*given)[0][0],
    }
    # As the norm behind the rule sees it.
    size = (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    errors = {name: (out - exact) / size for name, out in found.items()}
    assert rms(errors["ours"]) < 2 * rms(errors["theirs"])
    assert errors["ours"].abs().max() < 5 * errors["theirs"].abs().max()


def logprobs(logits_BNV: Tensor, rows_BN: Tensor) -> Tensor:
    """Of each row's tokens but the first."""
    return logits_BNV[:, :-1].double().log_softmax(-1).gather(-1, rows_BN[:, 1:, None]).squeeze(-1)


@pytest.mark.slow
def test_rows_of_hundreds_of_tokens_are_as_exact_as_with_transformers(tmp_path: Path) -> None:
    """Training against their chunks, rollouts against their steps with a cache, and the one against the other."""
    kind, extra = CASES["qwen3.5"]
    theirs: Any = tiny_shape.random_model(kind(**{**SHAPE, **extra, "max_position_embeddings": 512}), tmp_path)
    model = load(tmp_path)
    decoder = new_decoder(model, max_running=2)
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
