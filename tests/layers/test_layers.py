"""Single layers against their formulas. Two ranks are simulated by building both shards in one process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.layers.config import RopeConfig
from areno.layers.embedding import VocabParallelEmbedding
from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.norm import RMSNorm
from areno.layers.parallel import ParallelGroup
from areno.layers.rotary import Rotary, frequencies, rotate
from areno.layers.shard import WeightSpec

FP32 = WeightSpec(torch.float32, "cpu")


def ranks(size: int) -> list[ParallelGroup]:
    return [ParallelGroup(rank=rank, size=size) for rank in range(size)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_its_formula_and_keeps_the_dtype() -> None:
    x, weight = randn(5, 8) * 3, randn(8, seed=1)
    norm = RMSNorm(8, 1e-3, FP32)
    norm.weight.data = weight
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-6)
    half = RMSNorm(8, 1e-3, WeightSpec(torch.bfloat16, "cpu"))
    half.weight.data = weight.bfloat16()
    # 300 squared is beyond what bf16 can tell apart when summed: the mean has to be taken in fp32
    big = (x * 100).bfloat16()
    exact = big.double() / (big.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.bfloat16().double()
    assert half(big).dtype == torch.bfloat16
    torch.testing.assert_close(half(big).double(), exact, atol=0, rtol=2**-7)


def test_rotation_turns_complex_pairs() -> None:
    x, positions = randn(4, 3, 6), torch.tensor([0, 1, 2, 700])
    cos, sin = Rotary(RopeConfig(100.0), 6, device="cpu")(positions)
    freqs = torch.tensor([100.0 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
    phase = torch.exp(1j * positions.double()[:, None] * freqs)[:, None]
    turned = torch.complex(x[..., :3].double(), x[..., 3:].double()) * phase
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x, cos, sin).double(), expected, atol=2e-4, rtol=0)
    x64 = x.double().requires_grad_()
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16
    assert torch.equal(rotate(x, cos, sin)[0], x[0])
    rotate(x64, cos.double(), sin.double()).mul(randn(4, 3, 6, seed=2)).sum().backward()
    back = torch.complex(*[part.double() for part in randn(4, 3, 6, seed=2).split(3, dim=-1)]) * phase.conj()
    torch.testing.assert_close(x64.grad, torch.cat([back.real, back.imag], -1), atol=2e-4, rtol=0)


def test_llama3_frequency_bands() -> None:
    plain = frequencies(RopeConfig(500000.0), 128).double()
    scaled = frequencies(RopeConfig(500000.0, "llama3", factor=8.0), 128).double()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected = before
        elif wavelength > 8192:
            expected = before / 8
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - share) * before / 8 + share * before
        assert after == pytest.approx(expected, rel=1e-5)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8


@pytest.mark.parametrize("bias", [False, True])
def test_column_then_row_parallel_is_the_whole_product(bias: bool) -> None:
    x, w1, b1, w2, b2 = randn(5, 6), randn(16, 6, seed=1), randn(16, seed=2), randn(6, 8, seed=3), randn(6, seed=4)
    expected = F.linear(F.linear(x, w1, b1 if bias else None)[:, 8:], w2, b2 if bias else None)
    total = torch.zeros(5, 6)
    for tp in ranks(2):
        column = ColumnParallelLinear(6, (8, 8), replace(FP32, tp=tp), bias=bias)
        assert column.local_sizes == (4, 4)
        for name, full in (("weight", w1), ("bias", b1)):
            if name == "weight" or bias:
                for part, piece in zip(column.layout[name], full.split(8), strict=True):
                    part.region(getattr(column, name)).copy_(part.shard_of(piece))
        row = RowParallelLinear(8, 6, replace(FP32, tp=tp), bias=bias)
        (part,) = row.layout["weight"]
        part.region(row.weight).copy_(part.shard_of(w2))
        total += F.linear(F.linear(x, column.weight, column.bias)[:, 4:], row.weight)
    torch.testing.assert_close(total + (b2 if bias else 0), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("vocab", "size"), [(10, 1), (10, 2), (11, 2), (11, 4), (5, 4)])
def test_a_divided_vocabulary_covers_every_token_once(vocab: int, size: int) -> None:
    full = randn(vocab, 3)
    tokens = torch.arange(vocab)
    found = torch.zeros(vocab, 3)
    rows = []
    for tp in ranks(size):
        embedding = VocabParallelEmbedding(vocab, 3, replace(FP32, tp=tp))
        embedding.weight.detach().fill_(torch.nan)
        embedding.clear_padding()
        (part,) = embedding.layout["weight"]
        part.region(embedding.weight).copy_(part.shard_of(full))
        assert not embedding.weight.isnan().any()
        assert embedding.weight.shape[0] == -(-vocab // size)
        local = tokens[embedding.first : embedding.first + embedding.n_valid]
        found[local] += embedding.weight[: embedding.n_valid]
        rows.append(embedding.weight[: embedding.n_valid])
    assert torch.equal(torch.cat(rows), full)
    assert torch.equal(found, full)


def test_logits_are_fp32_also_from_bf16() -> None:
    embedding = VocabParallelEmbedding(7, 4, WeightSpec(torch.bfloat16, "cpu"))
    embedding.weight.data = randn(7, 4).bfloat16()
    hidden = randn(2, 4, seed=1).bfloat16()
    logits = embedding.matmul(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ embedding.weight.float().T, atol=0.05, rtol=0)
