"""Products of rows and weights that are rounded to FP8, and their gradients.

The product is q(x) q(W)^T, where q rounds each row of x and W (`quantize_rows`). It is the same function in all forms,
up to the order of sums: on FP8 units, as a product of codes in half precision (few rows), and as a product of
dequantized values, which any device has. Codes of W are (O, I), and `exponents` those of their scales.

Shape letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.config.fp8 import SIZE_MULTIPLE
from areno.kernels.backend import can_use_triton, has_fp8_units
from areno.kernels.fp8 import dequantize_rows, quantize_rows, round_rows, scales_from_exponents
from areno.kernels.matmul import add_matmul

FEW_ROWS = 16  # on an H200, the FP8 units take less time than `few_rows_matmul` for 17 rows and more
_FAST_FORWARD, _FAST_BACKWARD = True, False  # whether sums stay in the matrix units, see `_scaled_matmul`


@dataclass
class QuantizedMatrix:
    """A weight rounded by rows. Gradients pass the rounding unchanged.

    Attributes:
        scales_O: the scales of `exponents_O` in float32.
        dgrad: whether `input_gradient` rounds the gradient g of the output by rows, after it is multiplied by the
            scales of the weight.
        wgrad: whether `add_weight_gradient` rounds g and x over the tokens of each feature.
        row_multiple: products pad x to a multiple of this number of rows, for `engine.exact`.
    """

    codes_OI: Tensor
    exponents_O: Tensor
    scales_O: Tensor
    dgrad: bool = True
    wgrad: bool = False
    row_multiple: int = 1

    @staticmethod
    def of(weight_OI: Tensor, *, dgrad: bool = True, wgrad: bool = False) -> QuantizedMatrix:
        codes_OI, exponents_O = quantize_rows(weight_OI.detach())
        return QuantizedMatrix(codes_OI, exponents_O, scales_from_exponents(exponents_O), dgrad, wgrad)

    @torch.no_grad()
    def set(self, weight_OI: Tensor) -> None:
        """Round another weight into the same memory, which CUDA graphs read."""
        for mine, other in zip(self.buffers, type(self).of(weight_OI).buffers, strict=True):
            mine.copy_(other)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return self.codes_OI, self.exponents_O, self.scales_O

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize_rows(self.codes_OI, self.exponents_O, dtype)

    def uses_units(self, x: Tensor) -> bool:
        """Return whether products with x run on FP8 units, and not with dequantized values."""
        return can_multiply_in_fp8(x) and all(size % SIZE_MULTIPLE == 0 for size in self.codes_OI.shape)

    def linear(self, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return `matmul`, with a gradient for x and for the weight that has been rounded."""
        return _Linear.apply(x_NI, weight_OI, self)  # type: ignore[return-value]

    def matmul(self, x_NI: Tensor) -> Tensor:
        """Return q(x) q(W)^T in the dtype of x, without gradient."""
        if not self.uses_units(x_NI):
            return F.linear(round_rows(x_NI), self.dequantized(x_NI.dtype))
        codes = quantize_rows(x_NI, None, self.row_multiple, True)
        return self.matmul_codes(*codes, len(x_NI), x_NI.dtype)

    def matmul_codes(self, codes_NI: Tensor, scales_N: Tensor, n_rows: int, dtype: torch.dtype) -> Tensor:
        """Return the first `n_rows` of `matmul`, given x rounded with `row_multiple`. Needs `uses_units`."""
        if n_rows <= FEW_ROWS and self.row_multiple == 1:
            from areno.kernels.fp8.triton_few_rows import few_rows_matmul

            return few_rows_matmul(codes_NI, scales_N, self.codes_OI, self.scales_O, dtype)
        return _scaled_matmul(codes_NI, self.codes_OI, scales_N, self.scales_O, dtype, fast=_FAST_FORWARD)[:n_rows]

    def input_gradient(self, grad_NO: Tensor, codes: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return g q(W). `codes` may be codes and scales of g times the scales of the weight."""
        if not self.dgrad:
            return grad_NO @ self.dequantized(grad_NO.dtype)
        if not self.uses_units(grad_NO):
            rounded_NO = dequantize_rows(*quantize_rows(grad_NO, self.exponents_O), grad_NO.dtype)
            return rounded_NO @ self.codes_OI.to(grad_NO.dtype)
        from areno.kernels.fp8.triton import transpose

        codes_NO, scales_N = codes or quantize_rows(grad_NO, self.exponents_O, 1, True)
        codes_IO = transpose(self.codes_OI)  # for each call, so that it takes the memory of one layer only
        ones_I = torch.ones(len(codes_IO), device=codes_IO.device)
        return _scaled_matmul(codes_NO, codes_IO, scales_N, ones_I, grad_NO.dtype, fast=_FAST_BACKWARD)

    def add_weight_gradient(self, out_OI: Tensor, grad_NO: Tensor, x_NI: Tensor, is_rounded: bool = False) -> None:
        """Add g^T q(x) to `out_OI`. With `is_rounded`, x is q(x) already."""
        if not self.wgrad:
            add_matmul(out_OI, grad_NO.t(), x_NI if is_rounded else round_rows(x_NI))
            return
        if not self.uses_units(x_NI):
            grad_ON, x_IN = (round_rows(each.t().contiguous()) for each in (grad_NO, x_NI))
            add_matmul(out_OI, grad_ON, x_IN.t())
            return
        from areno.kernels.fp8.triton import quantize_columns

        (codes_ON, scales_O), (codes_IN, scales_I) = (quantize_columns(x, SIZE_MULTIPLE) for x in (grad_NO, x_NI))
        out_OI += _scaled_matmul(codes_ON, codes_IN, scales_O, scales_I, x_NI.dtype, fast=_FAST_BACKWARD)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, matrix: QuantizedMatrix) -> Tensor:
        ctx.save_for_backward(x_NI)
        ctx.matrix = matrix
        return matrix.matmul(x_NI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x_NI,), matrix, grad_NO = ctx.saved_tensors, ctx.matrix, grads[0].contiguous()
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = x_NI.new_zeros(matrix.codes_OI.shape)
            matrix.add_weight_gradient(of_weight, grad_NO, x_NI)
        return matrix.input_gradient(grad_NO) if ctx.needs_input_grad[0] else None, of_weight, None


def can_multiply_in_fp8(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and has_fp8_units(x.device) and can_use_triton(x)


def _scaled_matmul(
    a_NK: Tensor, b_MK: Tensor, scales_N: Tensor, scales_M: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a b^T for codes a and b. If not `fast`, matrix units add every 128 products to a sum in float32."""
    if not len(a_NK):
        return a_NK.new_empty((0, len(b_MK)), dtype=dtype)
    scales = scales_N.unsqueeze(1), scales_M.unsqueeze(0)
    return torch._scaled_mm(a_NK, b_MK.t(), *scales, out_dtype=dtype, use_fast_accum=fast)
