"""Rounding to FP8 against a search over all codes in float64, and the kernels against plain torch, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from areno.kernels import fp8
from areno.kernels.fp8 import reference
from tests.helpers.interpreted import run_interpreted

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
SHAPES = [(1, 2), (3, 7), (5, 128), (33, 64), (2, 3, 80), (4, 3000)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of many magnitudes, with zeros and elements that lie on or between codes."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-40, 40, (*shape[:-1], 1), generator=generator)
    x[..., ::5] = (x[..., ::5].contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)  # four significant bits
    x.view(-1)[0] = 0.0
    return x.to(dtype)


def nearest(values: list[float], x: float) -> float:
    """The nearest of sorted values; of two at the same distance, that with an even index (which has an even code)."""
    distances = [abs(value - x) for value in values]
    found = [index for index, distance in enumerate(distances) if distance == min(distances)]
    return values[next((index for index in found if index % 2 == 0), found[0])]


def test_values_are_the_nearest_of_all_codes() -> None:
    values = sorted({abs(v) for v in CODES.double().tolist() if not math.isnan(v)})
    for x in draw(40, 16):
        largest = x.abs().max().double().item()
        scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
        codes, exponent = fp8.quantize_rows(x)
        assert fp8.scales_from_exponents(exponent).item() == scale
        expected = [math.copysign(nearest(values, abs(v) / scale), v) for v in x.double().tolist()]
        assert codes.double().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantized_values_are_exact_and_stay(dtype: torch.dtype) -> None:
    x = draw(500, 64, dtype=dtype)
    codes, exponents = fp8.quantize_rows(x)
    exact = codes.double() * 2.0 ** (exponents.double() - 127).unsqueeze(-1)
    rounded = fp8.round_rows(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.double(), exact)
    assert torch.equal(fp8.dequantize_rows(codes, exponents, dtype), rounded)
    assert torch.equal(fp8.round_rows(rounded), rounded)
    error = (rounded.double() - x.double()).norm(dim=-1) / x.double().norm(dim=-1)
    assert 0.02 < error.mean() < 0.03


def test_the_edges_of_the_range() -> None:
    for largest, scale in ((448.0, 1.0), (448.00003, 2.0), (224.0, 0.5), (2.0**-130, 2.0**-111), (0.0, 2.0**-111)):
        codes, exponent = fp8.quantize_rows(torch.tensor([largest, 0.0]))
        assert fp8.scales_from_exponents(exponent).item() == scale
        assert codes.float()[0] * scale == pytest.approx(largest, rel=1e-6, abs=2.0**-120)
    for bad in (torch.inf, -torch.inf, torch.nan):
        assert fp8.round_rows(torch.tensor([[1.0, bad], [1.0, 2.0]])).isnan().tolist() == [[True, True], [False, False]]


def test_the_gradient_passes_through() -> None:
    x = draw(4, 8).requires_grad_()
    upstream = torch.randn(4, 8)
    y = fp8.round_rows_straight_through(x)
    y.backward(upstream)
    assert torch.equal(y.detach(), fp8.round_rows(x.detach()))
    assert torch.equal(x.grad, upstream)


def compare(device: str) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x = draw(*shape, dtype=dtype)
            for given, here in ((x, x.to(device)), (x[..., :-1], x.to(device)[..., :-1])):
                codes, exponents = fp8.quantize_rows(here)
                expected = reference.quantize_rows(given)
                assert torch.equal(codes.cpu().view(torch.uint8), expected[0].view(torch.uint8))
                assert torch.equal(exponents.cpu(), expected[1])
                assert torch.equal(fp8.dequantize_rows(codes, exponents, dtype).cpu(), reference.round_rows(given))
                assert torch.equal(fp8.round_rows(here).cpu(), reference.round_rows(given))
    codes, _ = fp8.quantize_rows(torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [1.0, 2.0]], device=device))
    assert codes.cpu().isnan().tolist() == [[True, True], [True, True], [False, False]]


def test_the_interpreted_kernels() -> None:
    run_interpreted("from tests.kernels.test_fp8 import compare; compare('cpu')")


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    compare("cuda")
    bad = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [1.0, 2.0]], device="cuda")
    assert fp8.round_rows(bad).isnan().tolist() == [[True, True], [True, True], [False, False]]
