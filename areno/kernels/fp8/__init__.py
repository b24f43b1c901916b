"""Rounding to FP8 (e4m3, arXiv 2209.05433) with one scale for each row: the only place where values are quantized.

A scale is the smallest power of two that brings a row within the range of e4m3. So a dequantized value, code * scale,
is exact in bfloat16, and quantizing it again changes nothing: products, caches and gradients that take codes, and those
that take dequantized values, see the same numbers. With other scales the error is 2.57 instead of 2.67 % (1.70 instead
of 2.66 % with outlier channels), but a dequantized value would be rounded a second time. CPU and GPU give equal bits.

Scales are stored as bytes, the biased exponent of a float32 (E8M0). A row with an inf or nan becomes nan.

Shape letters: N rows, C elements of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.kernels.backend import dispatch_by_device
from areno.kernels.fp8 import reference
from areno.kernels.fp8.reference import scales_from_exponents

__all__ = ["dequantize_rows", "quantize_rows", "round_rows", "round_rows_straight_through", "scales_from_exponents"]

quantize_rows = dispatch_by_device(reference.quantize_rows)
"""(N, C) -> codes (N, C) float8_e4m3fn, exponents (N,) uint8. Any leading dimensions; the last one is a row.

The argument `exponents_C`, if given, are those of scales by which the elements of a row are multiplied first. A matrix
gets rows of zeros at its end, up to a multiple of `row_multiple` rows. With `as_scales`, scales in float32 are returned
in place of exponents.
"""

dequantize_rows = dispatch_by_device(reference.dequantize_rows)
"""Return codes * scales in a dtype, without a rounding error. Leading dimensions as in `quantize_rows`."""

round_rows = dispatch_by_device(reference.round_rows)
"""Return `dequantize_rows(*quantize_rows(x))` in the dtype of x, without gradient."""


def round_rows_straight_through(x: Tensor) -> Tensor:
    """Do `round_rows`, with the gradient of the identity (straight-through estimator, arXiv 1308.3432)."""
    return _RoundRows.apply(x)  # type: ignore[return-value]


class _RoundRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return round_rows(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
