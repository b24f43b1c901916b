"""Frozen weights in int8: which numbers they are, and that dequantizing rounds nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.fp8.int8 import Int8Matrix

DTYPES = [torch.float32, torch.bfloat16]


def weight(dtype: torch.dtype, n_rows: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n_rows, 40, generator=generator) * 2.0 ** torch.arange(-n_rows, 0).unsqueeze(1)
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_nearest_codes_times_a_power_of_two(dtype: torch.dtype) -> None:
    given = weight(dtype)
    matrix = Int8Matrix.of(given)
    scales = 2.0 ** (given.double().abs().amax(-1) / 127).log2().ceil()
    assert torch.equal(matrix.scales_O.double(), scales)
    codes = (given.double() / scales.unsqueeze(1)).round()
    assert codes.abs().max() <= 127
    assert torch.equal(matrix.codes_OI.double(), codes)
    dequantized = matrix.dequantized(dtype)
    assert dequantized.dtype == dtype
    assert torch.equal(dequantized.double(), codes * scales.unsqueeze(1))
    again = Int8Matrix.of(dequantized)
    assert torch.equal(again.dequantized(dtype), dequantized)
    assert not matrix.uses_units(given)


def test_extreme_rows() -> None:
    given = torch.tensor([[0.0, 0.0], [127.0, -1.0], [127.5, 1.0], [1e-44, 0.0], [3e38, -3e38]])
    matrix = Int8Matrix.of(given)
    assert matrix.scales_O.tolist() == [1.0, 1.0, 2.0, 1.0, 2.0**121]
    assert torch.equal(matrix.dequantized(torch.float32)[1], given[1])
    assert matrix.dequantized(torch.float32)[3].tolist() == [0.0, 0.0]
    for bad in (torch.inf, torch.nan):
        found = Int8Matrix.of(torch.tensor([[1.0, bad], [1.0, 2.0]])).dequantized(torch.bfloat16)
        assert found.isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_gradients_are_those_of_dequantized_weights(dtype: torch.dtype) -> None:
    given = weight(dtype, 8)
    matrix = Int8Matrix.of(given)
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    expected = F.linear(x, matrix.dequantized(dtype))
    upstream = torch.randn_like(expected)
    [wanted] = torch.autograd.grad(expected, x, upstream)
    out = matrix.linear(x, given)
    [found] = torch.autograd.grad(out, x, upstream)
    assert torch.equal(out, expected)
    assert torch.equal(found, wanted)
    assert torch.equal(matrix.input_gradient(upstream), wanted)
    matrix.set(given * 3)
    assert torch.equal(matrix.dequantized(dtype), Int8Matrix.of(given * 3).dequantized(dtype))
