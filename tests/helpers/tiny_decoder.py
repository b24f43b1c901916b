"""A decoder over a tiny Qwen3, its requests, and the logits of a plain forward pass to compare with."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from areno.engine.decoder.decoder import Decoder
from areno.kernels.attention import choose_backend
from areno.layers.attention import PackedAttend
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from areno.models.weights import load_weights
from areno.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.helpers.new_decoder import new_decoder

VOCAB, EOS, CONTEXT = 40, 3, 96


Outputs = dict[tuple[int, int], GenerationOutput]  # by request id and sample


_folder = tempfile.TemporaryDirectory()


@functools.cache
def tiny_folder() -> Path:
    """A model folder of transformers, with logits spread enough for stop tokens and ties to mean something."""
    return random_qwen3(Path(_folder.name), VOCAB, CONTEXT, 0.15, EOS)


def random_qwen3(
    folder: Path, vocab_size: int, context: int, initializer_range: float, eos_token_id: int, seed: int = 0
) -> Path:
    """Save a tiny Qwen3 with random weights."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@functools.cache
def model(device: str = "cpu", dtype: torch.dtype = torch.float32, folder: Path | None = None) -> Transformer:
    folder = folder or tiny_folder()
    built = build_model(load_config(folder), dtype=dtype, device=device)
    load_weights(built, folder)
    return built


def make_decoder(of: Transformer | None = None, drafter: Any = None, **settings) -> Decoder:
    options = {"n_blocks": 128, "max_running": 32, "eos_token_ids": [EOS]}
    decoder = new_decoder(of or model(), **{**options, **settings})
    decoder.use_drafter(drafter)
    return decoder


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, VOCAB) for _ in range(length)]


def request(request_id: int, length: int = 9, n_samples: int = 1, **params) -> GenerationRequest:
    """Each id has its own prompt and seed. Without settings: 12 tokens drawn at temperature 1."""
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt(request_id, length),
        n_samples=n_samples,
        seed=request_id + 100,
        params=SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, **params}),
    )


def assert_all_blocks_are_free(decoder: Decoder) -> None:
    decoder._scheduler.cache_departed()
    assert decoder.blocks.n_available == decoder.blocks.n_blocks


def run(decoder: Decoder) -> Outputs:
    outputs: Outputs = {}
    for _ in range(2000):
        for output in decoder.step():
            assert (output.request_id, output.sample) not in outputs
            outputs[output.request_id, output.sample] = output
        if not decoder.has_work:
            break
    assert not decoder.has_work
    assert_all_blocks_are_free(decoder)
    assert decoder.stats.running == decoder.stats.waiting == 0
    return outputs


def generate(*requests: GenerationRequest, **settings) -> Outputs:
    decoder = make_decoder(**settings)
    for item in requests:
        decoder.submit(item)
    return run(decoder)


def assert_same(got: Outputs, expected: Outputs) -> None:
    assert got.keys() == expected.keys()
    for key, output in got.items():
        assert output.tokens == expected[key].tokens, key
        assert output.finish_reason == expected[key].finish_reason
        assert output.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)


def forward_logits(tokens: list[int], of: Transformer | None = None) -> torch.Tensor:
    """(len, vocab) by one pass over the whole row. On the CPU without Triton, which is slow there and is compared."""
    of = of or model()
    device = of.embed.weight.device
    row = torch.tensor(tokens, device=device)
    cu = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
    with torch.no_grad(), mock.patch("areno.kernels.backend.is_triton_interpreted", return_value=False):
        attend = PackedAttend(cu, len(tokens), choose_backend("native", device, of.embed.weight.dtype))
        return of.logits(of(row, torch.arange(len(tokens), device=device), attend))


MIXED = [
    request(1, 9, n_samples=3),
    request(2, 1, temperature=0.7),
    request(3, 17, n_samples=2, top_k=4),
    request(4, 8, greedy=True),
    request(5, 30, top_p=0.8, temperature=1.3),
    request(6, 12, n_samples=4, max_new_tokens=23),
    request(7, 5, ignore_eos=False, min_new_tokens=2, max_new_tokens=40),
    request(8, 4, max_new_tokens=1, n_samples=2),
]


@functools.cache
def mixed_outputs() -> Outputs:
    return generate(*MIXED)
