"""The fused layer against the plain one through autograd: on the GPU, and interpreted on the CPU."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from areno.config.fp8 import FP8Config
from areno.kernels.attention import choose_backend
from areno.layers.attention import PackedAttend
from areno.layers.config import RopeConfig
from areno.layers.parallel import ParallelGroup
from areno.models.config import LayerKind
from areno.models.transformer import Transformer
from tests.helpers.fused_layers import (
    BARE,
    DELTA,
    LIKE_QWEN,
    SMALL,
    SOME,
    build,
    compare,
    run,
)
from tests.helpers.interpreted import on_ranks, run_interpreted


def freeze(model: Transformer, names: tuple[str, ...]) -> None:
    """Freeze the parameters whose names contain one of `names`, and give the others float32 gradients of 0."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
        else:
            parameter.grad = torch.zeros_like(parameter)


SOME_FROZEN = ("mlp", "qkv.weight", "q_norm", "input_norm", "out.bias")
LOWER_FROZEN = ("embed", "layers.0", "layers.1.input_norm", "layers.1.attention")  # the stream has no gradient at first
NORM_ONLY = ("embed", "layers")


def compare_frozen() -> None:
    """What is not frozen has the gradients of the plain layers; what is frozen has none, and needs no buffer."""
    of_llama = [({}, names) for names in (SOME_FROZEN, LOWER_FROZEN, NORM_ONLY)]
    of_qwen = [(LIKE_QWEN, names) for names in (("delta.norm", "A_log"), ("layers.0.delta",))]
    for changes, names in of_llama + of_qwen:
        found = []
        for is_fused in (False, True):
            model = build(torch.float32, "cpu", **changes)
            freeze(model, names)
            with mock.patch("areno.kernels.backend.is_triton_interpreted", return_value=is_fused):
                attend = PackedAttend(torch.tensor([0, 3, 5], dtype=torch.int32), 3, "sdpa")
                assert model.runs_fused(attend) == is_fused
                model(torch.arange(5), torch.tensor([0, 1, 2, 0, 1]), attend, recompute=True).square().sum().backward()
            found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        for name, expected in found[0].items():
            if any(part in name for part in names):
                assert expected is found[1][name] is None
            else:
                assert expected is not None
                assert expected.any()
                torch.testing.assert_close(found[1][name], expected, atol=1e-4, rtol=1e-4)


def compare_interpreted() -> None:
    """Run in a process of its own, since Triton decides at its import whether it interprets."""
    compare("cpu", torch.float32, 1e-5, "sdpa", ({}, SOME))  # of two layers, SOME keeps one and repeats the other
    compare("cpu", torch.float32, 1e-5, "sdpa", (SOME,), qk_norm=False, **BARE)
    compare("cpu", torch.float32, 1e-5, "sdpa", (SOME,), fp8_kv=True)
    for wgrad in (False, True):
        compare("cpu", torch.float32, 1e-5, "sdpa", (SOME,), fp8=FP8Config(wgrad=wgrad))
    compare("cpu", torch.float32, 1e-5, "sdpa", ({}, SOME), shares=True)
    compare("cpu", torch.float32, 1e-5, "sdpa", ({}, SOME), shares=True, linked=True)
    compare("cpu", torch.float16, 1e-2, "sdpa", (SOME,), num_heads=4, num_kv_heads=4, head_dim=16, hidden_size=32)


NOPE = RopeConfig(1.0, "none")
LIKE_GEMMA: dict[str, Any] = {
    "norms": "both",
    "norm_plus_one": True,
    "activation": "gelu_tanh",
    "embed_scale": 3.0,
    "num_layers": 3,
    "kinds": (LayerKind(SMALL["rope"], 2), LayerKind(RopeConfig(10.0, partial=0.5)), LayerKind(NOPE, 2)),
}
LIKE_GPT_OSS: dict[str, Any] = {
    "attention_sinks": True,
    "qk_norm": False,
    "kinds": (LayerKind(SMALL["rope"], 2), LayerKind(SMALL["rope"])),
}
LIKE_OLMO: dict[str, Any] = {"norms": "after", "qk_norm": False, "qk_norm_whole": True}


def compare_families() -> None:
    """The same for what only some families have."""
    compare("cpu", torch.float32, 1e-5, "sdpa", (SOME,), **LIKE_GEMMA)
    compare("cpu", torch.float32, 1e-5, "sdpa", (SOME,), **LIKE_OLMO)
    for shared in ({}, {"shares": True}, {"shares": True, "linked": True}):
        compare("cpu", torch.float32, 1e-5, "sdpa", (SOME,), **shared, **LIKE_GPT_OSS)


def compare_states() -> None:
    """The same with a recurrent state."""
    compare("cpu", torch.float32, 1e-5, "sdpa", (SOME,), **LIKE_QWEN)


def compare_rank(rank: int, rendezvous: str) -> None:
    """One of two ranks, with shared tokens, too: hidden states and gradients are those of one alone."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    delta = replace(DELTA, n_value_heads=4)
    like_qwen = {**LIKE_QWEN, "num_kv_heads": 2, "num_layers": 2, "delta": delta}
    like_gpt_oss = {**LIKE_GPT_OSS, "num_kv_heads": 1, "kinds": LIKE_GPT_OSS["kinds"][:1]}
    for like in ({"num_kv_heads": 1}, like_gpt_oss, {**LIKE_OLMO, "num_kv_heads": 2}, like_qwen):
        compare_share(rank, **like)
    dist.destroy_process_group()


def compare_share(rank: int, **like: Any) -> None:
    changes: dict[str, Any] = {**BARE, "num_heads": 4, "num_layers": 1, **like}
    with mock.patch("areno.kernels.backend.is_triton_interpreted", return_value=False):
        alone = build(torch.float32, "cpu", **changes)
        expected = run(alone, "sdpa", is_fused=False)
    whole = dict(alone.named_parameters())
    tp = ParallelGroup(rank, 2, dist.group.WORLD)
    for how in ({}, {"split": True, "recompute": True}, {"split": True}):
        divided = build(torch.float32, "cpu", tp, **changes)
        for name, parameter in divided.named_parameters():
            for part, of_alone in zip(divided.tensor_parts(name), alone.tensor_parts(name), strict=True):
                part.region(parameter).copy_(part.shard_of(of_alone.region(whole[name])))
        got = run(divided, "sdpa", is_fused=True, **how)
        torch.testing.assert_close(got[:2], expected[:2], atol=1e-4, rtol=1e-4)
        for name, parameter in divided.named_parameters():
            mine, expected_grad = parameter.grad, whole[name].grad
            assert mine is not None
            assert expected_grad is not None
            for elements, n in divided.partial_gradient_slices(name, split="split" in how):
                tp.sum_over_replicas(mine.view(-1)[elements], n)
            for part, full in zip(divided.tensor_parts(name), alone.tensor_parts(name), strict=True):
                theirs = part.shard_of(full.region(expected_grad))
                torch.testing.assert_close(part.region(mine), theirs, atol=1e-4, rtol=1e-4, msg=f"{name} {how}")


def compare_two_ranks() -> None:
    """Two processes of an interpreting one."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(compare_rank, (f"{folder}/meet",), 2)


def compare_pieces() -> None:
    """MLPs compute 6 tokens in pieces of 4 and 2, alone and on two ranks."""
    with mock.patch("areno.layers.mlp.mlp_piece_tokens", return_value=4):
        compare("cpu", torch.float32, 1e-5, "sdpa", ({}, SOME))
        with tempfile.TemporaryDirectory() as folder:
            on_ranks(compare_rank_in_pieces, (f"{folder}/meet",), 2)


def compare_rank_in_pieces(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    compare_share(rank, num_kv_heads=1)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "what",
    [
        "compare_families",
        *(
            pytest.param(f"compare_{name}", marks=pytest.mark.slow)
            for name in ("interpreted", "states", "frozen", "two_ranks", "pieces")
        ),
    ],
)
def test_interpreted_layers_are_the_plain_ones(what: str) -> None:
    run_interpreted(f"from tests.layers.test_fused import {what}; {what}()", timeout=200)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": False, **BARE},
        LIKE_GEMMA,
        LIKE_OLMO,
        LIKE_QWEN,
        {"shares": True},
        {"shares": True, "linked": True},
    ],
    ids=["all", "bare", "like gemma", "like olmo", "like qwen 3.5", "shared prefixes", "linked micro-batches"],
)
def test_layers_on_the_gpu_are_the_plain_ones(changes: dict[str, Any]) -> None:
    compare("cuda", torch.float32, 1e-4, "sdpa", **changes)
    half = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 320, "initializer_range": 0.1, **changes}
    backend = choose_backend("native", "cuda", torch.bfloat16)
    compare("cuda", torch.bfloat16, 3e-2, backend, **half)
