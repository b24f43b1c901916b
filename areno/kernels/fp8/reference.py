"""Rounding to FP8 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.matmul import pad_rows

LEAST_EXPONENT = 16  # of a scale, biased: the least code times the least scale is 2^-120, exact in bfloat16
_OF_MAX = 8  # the exponent of 448 = 1.75 * 2^8, the largest value of e4m3
_MANTISSA, _MANTISSA_OF_MAX = 0x7FFFFF, 0x600000  # all mantissa bits of a float32, and those of 1.75
_NOT_FINITE = 255


def quantize_rows(
    x_NC: Tensor, exponents_C: Tensor | None = None, row_multiple: int = 1, as_scales: bool = False
) -> tuple[Tensor, Tensor]:
    x_NC = x_NC if row_multiple == 1 else pad_rows(x_NC, row_multiple)
    x_NC = x_NC.float() if exponents_C is None else x_NC.float() * scales_from_exponents(exponents_C)
    largest_N = x_NC.detach().abs().contiguous().view(torch.int32).amax(-1)  # as integers, so that a nan is the largest
    exponents_N = (largest_N >> 23) - _OF_MAX + ((largest_N & _MANTISSA) > _MANTISSA_OF_MAX).int()
    exponents_N = exponents_N.clamp(min=LEAST_EXPONENT)
    inverse_N = ((254 - exponents_N) << 23).view(torch.float32)
    inverse_N = torch.where((largest_N >> 23) == _NOT_FINITE, torch.nan, inverse_N)
    exponents_N = exponents_N.to(torch.uint8)
    codes_NC = (x_NC * inverse_N.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes_NC, scales_from_exponents(exponents_N) if as_scales else exponents_N


def scales_from_exponents(exponents: Tensor) -> Tensor:
    return (exponents.int() << 23).view(torch.float32)


def dequantize_rows(codes_NC: Tensor, exponents_N: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes_NC.float() * scales_from_exponents(exponents_N).unsqueeze(-1)).to(dtype)


def round_rows(x_NC: Tensor) -> Tensor:
    return dequantize_rows(*quantize_rows(x_NC), x_NC.dtype)
