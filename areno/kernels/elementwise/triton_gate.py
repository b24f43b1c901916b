# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The gate of a shared expert as Triton kernels. The plain form is `areno/layers/mlp.py`."""

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
