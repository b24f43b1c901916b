"""A frozen weight as int8 codes with a power of two as scale for each output, for devices without FP8 units.

Inputs are not rounded. A code times a power of two is exact in bfloat16, so the product with dequantized values is a
product of bfloat16 or float32, which every device has. The dequantized weight exists during a product only.

Shape letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.fp8 import scales_from_exponents
from areno.kernels.fp8.matmul import QuantizedMatrix
from areno.kernels.matmul import FixedOrderMatmul

_LARGEST = 127  # the largest code; the least one is -127
_LEAST_EXPONENT, _MOST_EXPONENT = 1, 254  # of a normal scale, biased


@dataclass
class Int8Matrix(QuantizedMatrix):
    """A weight rounded to int8 by rows. Gradients for inputs are those of a product with the dequantized weight.

    Attributes:
        fixed_order: computes the product for `engine.exact`.
    """

    fixed_order: FixedOrderMatmul | None = None

    @staticmethod
    @torch.no_grad()
    def of(weight_OI: Tensor, *, dgrad: bool = False, wgrad: bool = False) -> Int8Matrix:
        codes_OI, exponents_O = _quantize(weight_OI)
        return Int8Matrix(codes_OI, exponents_O, _scales(exponents_O), dgrad=False, wgrad=False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.codes_OI * self.scales_O.to(dtype).unsqueeze(1)

    def uses_units(self, x: Tensor) -> bool:
        return False

    def matmul(self, x_NI: Tensor) -> Tensor:
        """Return x q(W)^T in the dtype of x, without gradient."""
        weight_OI = self.dequantized(x_NI.dtype)
        return F.linear(x_NI, weight_OI) if self.fixed_order is None else self.fixed_order(x_NI, weight_OI, x_NI.dtype)


def _quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (O, I) int8 and exponents (O,) uint8. A row with an inf or nan gets the exponent of nan."""
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(-1)
    mantissa_O, exponent_O = torch.frexp(largest_O / _LARGEST)  # mantissa * 2^exponent, with a mantissa from 0.5 to 1
    exponent_O = exponent_O - (mantissa_O == 0.5).int()  # the least power of two that is no less
    exponents_O = (exponent_O + 127).clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    exponents_O = torch.where(largest_O.isfinite(), exponents_O, 255).to(torch.uint8)
    inverse_O = scales_from_exponents(254 - exponents_O.clamp(max=253))
    codes_OI = (weight_OI.nan_to_num() * inverse_O.unsqueeze(1)).round().clamp(-_LARGEST, _LARGEST)
    return codes_OI.to(torch.int8), exponents_O


def _scales(exponents_O: Tensor) -> Tensor:
    """Return the scales in float32, nan for the exponent of nan."""
    return torch.where(exponents_O == 255, torch.nan, scales_from_exponents(exponents_O))
