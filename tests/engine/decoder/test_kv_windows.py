"""Layers with windows in the decoder: the same samples as where they keep all blocks, with fewer preemptions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from areno.cost.kv_layout import KVLayout
from areno.cost.memory import kv_bytes_per_token
from areno.engine.decoder.decoder import Decoder
from areno.errors import EngineError
from areno.models.transformer import Transformer
from areno.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.helpers.family_cases import random_model
from tests.helpers.family_rollouts import prompt
from tests.helpers.new_decoder import new_decoder
from tests.helpers.tiny_decoder import assert_all_blocks_are_free
from tests.helpers.two_ranks import load

Outputs = dict[tuple[int, int], GenerationOutput]
CASE = "gemma3-tied"  # five layers with a window of 5 tokens, and one without


@cache
def models() -> tuple[Transformer, Any]:
    """Ours, and the same of transformers."""
    with TemporaryDirectory() as folder:
        reference = random_model(CASE, Path(folder))
        return load(Path(folder)), reference


def make(**settings: Any) -> Decoder:
    return new_decoder(models()[0], **settings)


def request(number: int, tokens: list[int], n_samples: int = 1, n_new: int = 12) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=n_new, ignore_eos=True)
    return GenerationRequest(request_id=number, prompt=tokens, n_samples=n_samples, seed=number, params=params)


def run(decoder: Decoder, requests: list[GenerationRequest], abort_at: int = 0) -> Outputs:
    """All outputs, by request and sample; request 99 is aborted after so many steps."""
    for item in requests:
        decoder.submit(item)
    outputs: Outputs = {}
    steps = 0
    while decoder.has_work:
        outputs |= {(output.request_id, output.sample): output for output in decoder.step()}
        steps += 1
        if steps == abort_at:
            decoder.abort(99)
    assert_all_blocks_are_free(decoder)
    return outputs


def conversation(decoder: Decoder) -> Outputs:
    """Samples of long prompts, one aborted, then two turns that go on from what was said."""
    heard = prompt(1, 60)
    first = [request(1, heard, 4, 24), request(2, prompt(2, 37), 2, 9), request(99, prompt(3, 50), 2, 20)]
    outputs = run(decoder, first, abort_at=9)
    for turn, before in ((3, 1), (4, 3)):
        heard = [*heard, *outputs[before, 0].tokens, 7, 8, 9]
        outputs |= run(decoder, [request(turn, heard, 2, 6)])
    return outputs


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "cut prompts": {"max_prefill_tokens": 11},
    "few blocks": {"n_blocks": 28},
    "exact": {"attn_backend": "fixed_order", "exact": True},
    "exact, cut prompts": {"attn_backend": "fixed_order", "exact": True, "max_prefill_tokens": 11},
}


# "exact, cut prompts" is both.
BOTH = ("cut prompts", "exact")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in BOTH else name for name in SETTINGS]
)
def test_samples_are_those_of_a_cache_that_keeps_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS[name]
    decoder = make(**settings)
    grouped = conversation(decoder)
    assert decoder.blocks.blocks_over_all_groups > 1
    of = KVLayout.from_config
    monkeypatch.setattr(KVLayout, "from_config", lambda *given, by_window: of(*given, by_window=False))
    keeps_all = make(**settings)
    masked = conversation(keeps_all)
    assert keeps_all.blocks.blocks_over_all_groups == 1
    if name == "few blocks":
        assert decoder.stats.preemptions < keeps_all.stats.preemptions
    else:  # turns find as much of what was said before
        assert decoder.stats.cached_prompt_tokens == keeps_all.stats.cached_prompt_tokens > 150
    assert masked.keys() == grouped.keys()
    for key, out in grouped.items():
        n_same = (
            min(len(out.tokens), len(masked[key].tokens)) if key[0] == 99 else len(out.tokens)
        )  # of the aborted one
        assert out.tokens[:n_same] == masked[key].tokens[:n_same]
        logprobs, expected = (torch.tensor(each.logprobs[:n_same]) for each in (out, masked[key]))
        torch.testing.assert_close(logprobs, expected, atol=0 if "exact" in name else 1e-5, rtol=0)


@pytest.mark.parametrize("by_window", [True, False])
def test_what_a_cache_has_room_for(by_window: bool) -> None:
    """cache_tokens tell its memory, however its blocks are made; kv_tokens how long one sequence may be."""
    decoder = make(n_blocks=8, keeps_routes=not by_window)
    limits, config = decoder.limits, decoder.runner.model.config
    assert decoder.blocks.blocks_over_all_groups == (6 if by_window else 1)
    cache = decoder.runner.cache.kv_blocks
    used = cache[:, :, :-1]  # without the scratch block
    assert limits.cache_tokens == 8 * 4 == used.numel() * cache.itemsize // kv_bytes_per_token(config, cache.itemsize)
    # Of 48 blocks of one layer, the five with a window of 5 take at most 3 each. The others are one layer's alone.
    assert limits.kv_tokens == ((48 - 5 * 3) * 4 if by_window else 8 * 4)
    n_prompt = limits.kv_tokens - 5
    assert limits.max_new(request(1, [1] * n_prompt, n_new=6)) == 6  # the last token is never an input
    with pytest.raises(EngineError, match=f"does not fit the KV cache of {limits.kv_tokens} tokens even alone"):
        limits.max_new(request(1, [1] * n_prompt, n_new=7))


@pytest.mark.slow
def test_log_probabilities_are_those_of_transformers() -> None:
    decoder = make(max_prefill_tokens=11)
    items = {item.request_id: item for item in (request(1, prompt(1, 60), 3, 40), request(2, prompt(2, 37), 2, 20))}
    for (number, _), out in run(decoder, list(items.values())).items():
        tokens = torch.tensor([items[number].prompt + out.tokens])
        with torch.no_grad():
            logprobs = models()[1](tokens).logits[0].log_softmax(-1)
        start = len(items[number].prompt)
        expected = logprobs[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)
