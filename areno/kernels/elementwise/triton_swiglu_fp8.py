# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The activation of a gated MLP that rounds its results to FP8, as `triton_swiglu` and then `quantize_rows` do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.elementwise.triton_swiglu import glu, glu_backward
from areno.kernels.fp8.triton import quantize, scales, scales_for, to_e4m3
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

_BLOCK = 2048


def swiglu_codes(gate_up_N2I: Tensor, gelu: bool, row_multiple: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of silu(gate) * up, with rows of zeros up to a multiple of `row_multiple`."""
    n, inner = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    n_out = n + -n % row_multiple
    codes_NI = torch.empty((n_out, inner), dtype=torch.float8_e4m3fn, device=gate_up_N2I.device)
    scales_N = torch.empty(n_out, dtype=torch.float32, device=gate_up_N2I.device)
    if n:
        block = triton.next_power_of_2(inner)
        _swiglu_kernel[(n_out,)](
            gate_up_N2I.contiguous(),
            codes_NI,
            scales_N,
            n,
            inner,
            BLOCK=block,
            GELU=gelu,
            num_warps=min(16, max(4, block // 512)),
        )
    return codes_NI, scales_N


def swiglu_backward_codes(
    grad_NI: Tensor, gate_up_N2I: Tensor, gelu: bool, exponents_2I: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the gradients of gate and up, side by side, and `round_rows` of silu(gate) * up.

    Also return codes and scales of these gradients, multiplied by the scales of `exponents_2I`.
    """
    n, inner = grad_NI.shape
    grad_gate_up_N2I, act_NI = torch.empty_like(gate_up_N2I), torch.empty_like(grad_NI)
    codes_N2I = torch.empty(gate_up_N2I.shape, dtype=torch.float8_e4m3fn, device=grad_NI.device)
    scales_N = torch.empty(n, dtype=torch.float32, device=grad_NI.device)
    if n:
        _swiglu_backward_kernel[(n,)](
            grad_NI.contiguous(),
            gate_up_N2I.contiguous(),
            exponents_2I,
            grad_gate_up_N2I,
            act_NI,
            codes_N2I,
            scales_N,
            inner,
            BLOCK=_BLOCK,
            GELU=gelu,
            num_warps=8,
        )
    return grad_gate_up_N2I, act_NI, (codes_N2I, scales_N)


@kernel(do_not_specialize=["n"])
def _swiglu_kernel(gate_up_ptr, codes_ptr, scales_ptr, n, inner, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = program_id_64(0)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < inner
    place = gate_up_ptr + row * (2 * inner) + column
    real = inside & (row + tl.arange(0, 1) < n)[:, None]
    gate, up = load_fp32(place, real), load_fp32(place + inner, real)
    codes, exponent = quantize(glu(gate, up, gate_up_ptr, GELU).to(tl.float32))
    tl.store(codes_ptr + row * inner + column, codes, mask=inside)
    tl.store(scales_ptr + row + tl.arange(0, 1), scales(exponent))


@triton.jit
def _values(grad_ptr, gate_up_ptr, columns_ptr, row, column, inner, GELU: tl.constexpr):
    """Return silu(gate) * up, the gradients of gate and up, and these gradients times the scales of their columns."""
    inside = column < inner
    place = gate_up_ptr + row * (2 * inner) + column
    gate, up = load_fp32(place, inside), load_fp32(place + inner, inside)
    grad = load_fp32(grad_ptr + row * inner + column, inside)
    act, gate_grad, up_grad = glu_backward(grad, gate, up, gate_up_ptr, GELU)
    gate_scale = scales(load_masked(columns_ptr + column, inside))
    up_scale = scales(load_masked(columns_ptr + inner + column, inside))
    return act, gate_grad, up_grad, gate_grad * gate_scale, up_grad * up_scale


@triton.jit
def _bits(x):
    return tl.abs(x).to(tl.int32, bitcast=True)  # as integers, so that a nan is the largest


@kernel
def _swiglu_backward_kernel(
    grad_ptr,
    gate_up_ptr,
    columns_ptr,
    grad_gate_up_ptr,
    act_ptr,
    codes_ptr,
    scales_ptr,
    inner,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """Find the largest values of a row first, and compute all values again to round them, from the cache."""
    row = program_id_64(0)
    largest_act = tl.zeros([1, BLOCK], tl.int32)
    largest_grad = tl.zeros([1, BLOCK], tl.int32)
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        act, _gate, _up, gate, up = _values(grad_ptr, gate_up_ptr, columns_ptr, row, column, inner, GELU)
        largest_act = tl.maximum(largest_act, _bits(act))
        largest_grad = tl.maximum(largest_grad, tl.maximum(_bits(gate), _bits(up)))
    act_exponent, act_inverse = scales_for(tl.max(largest_act, axis=1))
    exponent, inverse = scales_for(tl.max(largest_grad, axis=1))
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = column < inner
        act, gate_grad, up_grad, gate, up = _values(grad_ptr, gate_up_ptr, columns_ptr, row, column, inner, GELU)
        rounded = to_e4m3(act * act_inverse[:, None]).to(tl.float32) * scales(act_exponent)[:, None]
        tl.store(act_ptr + row * inner + column, rounded, mask=inside)
        place = row * (2 * inner) + column
        tl.store(grad_gate_up_ptr + place, gate_grad, mask=inside)
        tl.store(grad_gate_up_ptr + place + inner, up_grad, mask=inside)
        tl.store(codes_ptr + place, to_e4m3(gate * inverse[:, None]), mask=inside)
        tl.store(codes_ptr + place + inner, to_e4m3(up * inverse[:, None]), mask=inside)
    tl.store(scales_ptr + row + tl.arange(0, 1), scales(exponent))
