# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The activation of a gated MLP as Triton kernels. The plain form is `areno/layers/mlp.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.jit import kernel, load_fp32, program_id_64, round_to_dtype


def swiglu(gate_up_N2I: Tensor, gelu: bool = False) -> Tensor:
    """Return silu(gate) * up."""
    n, inner = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    out_NI = gate_up_N2I.new_empty((n, inner))
    if n:
        options = jit.pdl_options(out_NI.device)
        _swiglu_kernel[(n, triton.cdiv(inner, 1024))](
            gate_up_N2I.contiguous(), out_NI, inner, BLOCK=1024, GELU=gelu, **options
        )
    return out_NI


def swiglu_backward(grad_NI: Tensor, gate_up_N2I: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, side by side, and silu(gate) * up again, in one pass over memory."""
    n, inner = grad_NI.shape
    grad_gate_up_N2I = torch.empty_like(gate_up_N2I)
    out_NI = torch.empty_like(grad_NI)
    if n:
        _swiglu_backward_kernel[(n, triton.cdiv(inner, 1024))](
            grad_NI.contiguous(), gate_up_N2I.contiguous(), grad_gate_up_N2I, out_NI, inner, BLOCK=1024, GELU=gelu
        )
    return grad_gate_up_N2I, out_NI


@triton.jit
def _gelu_argument(gate):
    """Return 2 sqrt(2 / pi) (x + 0.044715 x^3). x times its sigmoid is the tanh form of GELU (arXiv 1606.08415)."""
    return gate * (1.5957691216057308 + 0.0713548162726 * gate * gate)


@triton.jit
def glu(gate, up, out_ptr, GELU: tl.constexpr):
    """Return silu(gate) * up, or gelu(gate) * up if GELU, rounded after each step to the dtype of `out_ptr`."""
    silu = round_to_dtype(gate * tl.sigmoid(_gelu_argument(gate) if GELU else gate), out_ptr)
    return (silu * up).to(out_ptr.dtype.element_ty)


@triton.jit
def glu_backward(grad, gate, up, out_ptr, GELU: tl.constexpr):
    """Return silu(gate) * up and the gradients of gate and up, each rounded to the dtype of `out_ptr`."""
    sigmoid = tl.sigmoid(_gelu_argument(gate) if GELU else gate)
    silu = round_to_dtype(gate * sigmoid, out_ptr)
    slope = gate
    if GELU:
        slope = gate * (1.5957691216057308 + 0.2140644488 * gate * gate)
    gate_grad = grad * up * sigmoid * (1.0 + slope * (1.0 - sigmoid))
    up_grad = round_to_dtype(grad * silu, out_ptr)
    return round_to_dtype(silu * up, out_ptr), round_to_dtype(gate_grad, out_ptr), up_grad


@kernel
def _swiglu_kernel(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr = False):
    if PDL:
        jit.launch_dependents()
    row = program_id_64(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place = gate_up_ptr + row * (2 * inner) + column
    if PDL:
        jit.wait_for_previous()
    gate = load_fp32(place, inside)
    up = load_fp32(place + inner, inside)
    tl.store(out_ptr + row * inner + column, glu(gate, up, out_ptr, GELU), mask=inside)


@kernel
def _swiglu_backward_kernel(
    grad_ptr, gate_up_ptr, grad_gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    row = program_id_64(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place = row * (2 * inner) + column
    gate = load_fp32(gate_up_ptr + place, inside)
    up = load_fp32(gate_up_ptr + place + inner, inside)
    grad = load_fp32(grad_ptr + row * inner + column, inside)
    act, gate_grad, up_grad = glu_backward(grad, gate, up, out_ptr, GELU)
    tl.store(out_ptr + row * inner + column, act, mask=inside)
    tl.store(grad_gate_up_ptr + place, gate_grad, mask=inside)
    tl.store(grad_gate_up_ptr + place + inner, up_grad, mask=inside)
