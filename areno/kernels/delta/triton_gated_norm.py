# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The norm of each head of the rule's result times silu(z), and its backward pass. Letters as in the package.

A head of a token is a line: there are M = N H of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.delta.parts import DeltaWeights
from areno.kernels.elementwise.triton_norm import add_sums, n_processors
from areno.kernels.jit import kernel

LINES, WARPS = 32, 8  # of a program, at once
PROGRAMS = 8  # of the backward kernel, for each processor of the device; see `triton_norm.py`


def gated_norm(out_NHV: Tensor, proj_NP: Tensor, weights: DeltaWeights, pdl: bool = False) -> Tensor:
    """(N, H V) in the dtype given. proj_NP: contiguous, for its part z.

    pdl: it ends a chain of kernels (`kernels/jit.py`) that have made out, and none of what is given.
    """
    n, n_heads, value_dim = out_NHV.shape
    normed_NI = proj_NP.new_empty(n, n_heads * value_dim)
    if n:
        _gated_norm_kernel[(triton.cdiv(n * n_heads, LINES),)](
            out_NHV.contiguous(), proj_NP, weights.norm_V, normed_NI, n * n_heads, weights.eps,
            CHANNELS=weights.sizes[0], HEADS=n_heads, VALUE=value_dim, BLOCK=triton.next_power_of_2(value_dim),
            LINES=LINES, num_warps=WARPS, **(jit.pdl_options(proj_NP.device) if pdl else {}),
        )  # fmt: skip
    return normed_NI


def gated_norm_backward(
    grad_NI: Tensor, out_NHV: Tensor, proj_NP: Tensor, weights: DeltaWeights, grad_proj_NP: Tensor, of_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the rule's result, in its dtype, and of the norm's weight (V,), float32, if it is wanted.

    Writes that of z into the gradient of what was given.
    """
    n, n_heads, value_dim = out_NHV.shape
    grad_out_NHV = torch.empty_like(out_NHV, memory_format=torch.contiguous_format)
    n_tiles = triton.cdiv(n * n_heads, LINES)
    n_programs = min(n_tiles, PROGRAMS * n_processors(proj_NP.device))
    sums_LV = torch.empty(n_programs, value_dim, dtype=torch.float32, device=proj_NP.device) if of_weights else None
    if n:
        _gated_norm_backward_kernel[(n_programs,)](
            grad_NI.contiguous(), out_NHV.contiguous(), proj_NP, weights.norm_V, grad_out_NHV, grad_proj_NP, sums_LV,
            n * n_heads, weights.eps,
            CHANNELS=weights.sizes[0], HEADS=n_heads, VALUE=value_dim, BLOCK=triton.next_power_of_2(value_dim),
            LINES=LINES, num_warps=WARPS,
        )  # fmt: skip
    if sums_LV is None:
        return grad_out_NHV, None
    grad_norm_V = sums_LV.new_zeros(value_dim)
    add_sums(sums_LV, grad_norm_V)
    return grad_out_NHV, grad_norm_V


@kernel(do_not_specialize=["n_lines"])
def _gated_norm_kernel(
    out_ptr,
    proj_ptr,
    norm_ptr,
    normed_ptr,
    n_lines,
    eps,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    PROJ: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    value = tl.arange(0, BLOCK)
    inside = (line < n_lines)[:, None] & (value < VALUE)[None, :]
    place = line[:, None] * VALUE + value[None, :]
    given = (line // HEADS * PROJ + CHANNELS + line % HEADS * VALUE)[:, None] + value[None, :]
    z = tl.load(proj_ptr + given, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + value, mask=value < VALUE, other=0.0).to(tl.float32)[None, :]
    if PDL:
        jit.wait_for_previous()
    out = tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = out * tl.rsqrt(tl.sum(out * out, axis=1) / VALUE + eps)[:, None] * weight * z * tl.sigmoid(z)
    tl.store(normed_ptr + place, out.to(normed_ptr.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["n_lines"])
def _gated_norm_backward_kernel(
    grad_ptr,
    out_ptr,
    proj_ptr,
    norm_ptr,
    grad_out_ptr,
    grad_proj_ptr,
    sums_ptr,
    n_lines,
    eps,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
):
    """Each program takes every n_programs-th tile of LINES lines and sums its share of the weight's gradient."""
    PROJ: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    value = tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + value, mask=value < VALUE, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([LINES, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_lines, LINES), tl.num_programs(0)):
        line = tl.cast(tile, tl.int64) * LINES + tl.arange(0, LINES)
        inside = (line < n_lines)[:, None] & (value < VALUE)[None, :]
        place = line[:, None] * VALUE + value[None, :]
        given = (line // HEADS * PROJ + CHANNELS + line % HEADS * VALUE)[:, None] + value[None, :]
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        out = tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(proj_ptr + given, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(z)
        per_size = tl.rsqrt(tl.sum(out * out, axis=1) / VALUE + eps)[:, None]
        out *= per_size
        grad_z = grad * out * weight * sigmoid * (1.0 + z * (1.0 - sigmoid))
        tl.store(grad_proj_ptr + given, grad_z.to(grad_proj_ptr.dtype.element_ty), mask=inside)
        grad *= z * sigmoid
        sums += grad * out
        grad *= weight
        grad = per_size * (grad - out * (tl.sum(grad * out, axis=1) / VALUE)[:, None])
        tl.store(grad_out_ptr + place, grad.to(grad_out_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0) * VALUE + value, tl.sum(sums, axis=0), mask=value < VALUE)
