# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The gates of a shared expert and of attention as Triton kernels.

The plain forms are in `areno/layers/mlp.py` and `areno/models/layer.py`. Q = H C. In the output of the projection,
`qkv_NX`, the gate of each query head stands behind its query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_fp32, program_id_64, round_to_dtype


def add_gated(out_ND: Tensor, x_ND: Tensor, gate_N1: Tensor) -> None:
    """Add x * sigmoid(gate) to `out_ND` in place, where the gate is one float32 number for each row."""
    n, size = x_ND.shape
    if n:
        given = out_ND, x_ND.contiguous(), gate_N1.contiguous(), size
        _add_gated_kernel[(n, triton.cdiv(size, 1024))](*given, BLOCK=1024)


def add_gated_backward(grad_ND: Tensor, x_ND: Tensor, gate_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the gate."""
    (n, size), grad_x_ND, grad_gate_N1 = x_ND.shape, torch.empty_like(x_ND), torch.empty_like(gate_N1)
    if n:
        given = grad_ND.contiguous(), x_ND.contiguous(), gate_N1.contiguous(), grad_x_ND, grad_gate_N1, size
        _add_gated_backward_kernel[(n,)](*given, BLOCK=1024)
    return grad_x_ND, grad_gate_N1


@kernel
def _add_gated_kernel(out_ptr, x_ptr, gate_ptr, size, BLOCK: tl.constexpr):
    row, column = program_id_64(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < size, row * size + column
    gated = round_to_dtype(load_fp32(x_ptr + place, inside) * tl.sigmoid(tl.load(gate_ptr + row)), out_ptr)
    tl.store(out_ptr + place, load_fp32(out_ptr + place, inside) + gated, mask=inside)


@kernel
def _add_gated_backward_kernel(grad_ptr, x_ptr, gate_ptr, grad_x_ptr, grad_gate_ptr, size, BLOCK: tl.constexpr):
    row = program_id_64(0)
    sigmoid = tl.sigmoid(tl.load(gate_ptr + row))
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, place = column < size, row * size + column
        grad = load_fp32(grad_ptr + place, inside)
        total += grad * load_fp32(x_ptr + place, inside)
        tl.store(grad_x_ptr + place, grad * sigmoid, mask=inside)
    tl.store(grad_gate_ptr + row, tl.sum(total, 0) * sigmoid * (1.0 - sigmoid))


def gate_heads(out_NQ: Tensor, qkv_NX: Tensor, head_dim: int) -> Tensor:
    """Return the output of attention times the sigmoid of its gates."""
    (n, size), gated_NQ = out_NQ.shape, torch.empty_like(out_NQ, memory_format=torch.contiguous_format)
    if n:
        given = out_NQ.contiguous(), qkv_NX, gated_NQ, qkv_NX.stride(0), size
        _gate_heads_kernel[(n, triton.cdiv(size, 1024))](*given, DIM=head_dim, BLOCK=1024)
    return gated_NQ


def gate_heads_backward(
    grad_NQ: Tensor, out_NQ: Tensor, qkv_NX: Tensor, grad_qkv_NX: Tensor, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Write the gates' gradient to their columns of `grad_qkv_NX`. Return that of the output, and `gate_heads`."""
    (n, size), grad_NQ, out_NQ = out_NQ.shape, grad_NQ.contiguous(), out_NQ.contiguous()
    grad_out_NQ, gated_NQ = torch.empty_like(out_NQ), torch.empty_like(out_NQ)
    if n:
        given = grad_NQ, out_NQ, qkv_NX, grad_out_NQ, gated_NQ, grad_qkv_NX, qkv_NX.stride(0), grad_qkv_NX.stride(0)
        _gate_heads_backward_kernel[(n, triton.cdiv(size, 1024))](*given, size, DIM=head_dim, BLOCK=1024)
    return grad_out_NQ, gated_NQ


@triton.jit
def _gate_column(column, DIM: tl.constexpr):
    return column // DIM * (2 * DIM) + DIM + column % DIM


@kernel
def _gate_heads_kernel(out_ptr, qkv_ptr, gated_ptr, qkv_stride, size, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row, column = program_id_64(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < size, row * size + column
    gate = load_fp32(qkv_ptr + row * qkv_stride + _gate_column(column, DIM), inside)
    gated = load_fp32(out_ptr + place, inside) * round_to_dtype(tl.sigmoid(gate), gated_ptr)
    tl.store(gated_ptr + place, gated, mask=inside)


@kernel
def _gate_heads_backward_kernel(
    grad_ptr,
    out_ptr,
    qkv_ptr,
    grad_out_ptr,
    gated_ptr,
    grad_qkv_ptr,
    qkv_stride,
    grad_stride,
    size,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = program_id_64(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place, gate_column = column < size, row * size + column, _gate_column(column, DIM)
    sigmoid = tl.sigmoid(load_fp32(qkv_ptr + row * qkv_stride + gate_column, inside))
    grad, out = load_fp32(grad_ptr + place, inside), load_fp32(out_ptr + place, inside)
    tl.store(grad_out_ptr + place, grad * sigmoid, mask=inside)
    tl.store(gated_ptr + place, out * round_to_dtype(sigmoid, gated_ptr), mask=inside)
    grad_gate = grad * out * sigmoid * (1.0 - sigmoid)
    tl.store(grad_qkv_ptr + row * grad_stride + gate_column, grad_gate, mask=inside)
