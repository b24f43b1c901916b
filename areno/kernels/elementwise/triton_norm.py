# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Residual addition with the RMS norm after it, and sums of partial gradients, as Triton kernels.

The plain form is in `areno/layers/norm.py`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

# Of the backward kernel, in which a program loops over tokens to sum weight gradients: elements of a tile, programs for
# each multiprocessor, warps of a program. The fastest on an H200 at hidden sizes of 1024, 2560 and 4096.
NORM_TILE, NORM_PROGRAMS, NORM_WARPS = 8192, 2, 4
# Elements of a row per warp: in general, and if the norm first sums several parts (decoding with few rows), where a
# rollout of 64 samples with Qwen3-0.6B takes 3 % longer with 256 on an H200.
_ELEMENTS, _ELEMENTS_OF_PARTS = 256, 128


def add_rms_norm(
    x_ND: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + delta in the dtype of x, and its RMS norm in the dtype of the weight.

    The norm is computed from the rounded stream. `delta` is (N, D), or its summands (parts, N, D), or None for 0.
    """
    x_ND = x_ND.contiguous()
    n, size = x_ND.shape
    normed_ND = torch.empty_like(x_ND, dtype=weight_D.dtype)
    sum_ND = x_ND
    if delta is not None:
        delta = delta.contiguous()
        sum_ND = torch.empty_like(x_ND)
    if n:
        block, parts = triton.next_power_of_2(size), len(delta) if delta is not None and delta.dim() == 3 else 1
        _add_norm_kernel[(n,)](
            x_ND,
            delta,
            sum_ND,
            weight_D,
            normed_ND,
            size,
            eps,
            PARTS=parts,
            BLOCK=block,
            PLUS_ONE=plus_one,
            num_warps=min(16, max(1, block // (_ELEMENTS if parts == 1 else _ELEMENTS_OF_PARTS))),
            **jit.pdl_options(x_ND.device),
        )
    return sum_ND, normed_ND


def rms_norm_backward(
    grad_ND: Tensor,
    grad_sum_ND: Tensor | None,
    sum_ND: Tensor,
    weight_D: Tensor,
    eps: float,
    weight_grad_D: Tensor | None,
    plus_one: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the residual stream twice: in the dtype of `sum_ND`, and in the dtype of `grad_ND`.

    `sum_ND` is the stream before the norm, and `grad_sum_ND` the gradient that reaches it past the norm. The weight's
    gradient is added to the float32 buffer `weight_grad_D`, if any. With equal dtypes, the results are the same tensor.
    """
    n, size = sum_ND.shape
    grad_ND, sum_ND = grad_ND.contiguous(), sum_ND.contiguous()
    out_ND = low_ND = torch.empty_like(sum_ND)
    if grad_ND.dtype != sum_ND.dtype:
        low_ND = torch.empty_like(grad_ND)
    if not n:
        return out_ND, low_ND
    block = triton.next_power_of_2(size)
    rows = max(1, NORM_TILE // block)
    n_programs = min(triton.cdiv(n, rows), NORM_PROGRAMS * n_multiprocessors(sum_ND.device))
    partial_PD = sum_ND.new_empty((n_programs, size), dtype=torch.float32)
    _norm_backward_kernel[(n_programs,)](
        grad_ND,
        None if grad_sum_ND is None else grad_sum_ND.contiguous(),
        sum_ND,
        weight_D,
        out_ND,
        None if low_ND is out_ND else low_ND,
        partial_PD,
        n,
        size,
        eps,
        ROWS=rows,
        BLOCK=block,
        PLUS_ONE=plus_one,
        num_warps=NORM_WARPS,
    )
    if weight_grad_D is not None:
        add_sums(partial_PD, weight_grad_D)
    return out_ND, low_ND


def add_sums(partial_PD: Tensor, out_D: Tensor) -> None:
    """Add the partial sums of P programs to `out_D` in place, in a fixed order. Both are float32."""
    n_programs, size = partial_PD.shape
    _add_sums_kernel[(triton.cdiv(size, 32),)](partial_PD, out_D, n_programs, size, ROWS=128, BLOCK=32, num_warps=8)


@functools.cache
def n_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def store_norm(place, x, weight, inside, size, eps, PLUS_ONE: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if PLUS_ONE:
        weight += 1.0
    tl.store(place, x * scale * weight, mask=inside)


@kernel
def _add_norm_kernel(
    x_ptr,
    delta_ptr,
    sum_ptr,
    weight_ptr,
    normed_ptr,
    size,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        jit.launch_dependents()
    row = program_id_64(0)
    n_rows = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if PDL:
        jit.wait_for_previous()
    weight = load_fp32(weight_ptr + column, inside)
    x = load_fp32(x_ptr + row * size + column, inside)
    if delta_ptr is not None:
        for part in tl.static_range(PARTS):
            place = delta_ptr + (part * n_rows + row) * size + column
            x += load_fp32(place, inside)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    store_norm(normed_ptr + row * size + column, x, weight, inside, size, eps, PLUS_ONE)


@kernel
def _norm_backward_kernel(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    weight_ptr,
    out_ptr,
    low_ptr,
    partial_ptr,
    n,
    size,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """In program i of P, compute tiles i, i + P, ... of ROWS rows, and a partial sum of the weight's gradient."""
    column = tl.arange(0, BLOCK)
    real = column < size
    weight = load_fp32(weight_ptr + column, real)
    if PLUS_ONE:
        weight += 1.0
    weight_grad = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & real[None, :]
        place = row.to(tl.int64)[:, None] * size + column[None, :]
        x = load_fp32(x_ptr + place, inside)
        grad = load_fp32(grad_ptr + place, inside)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]
        hat = x * scale
        weighted = grad * weight[None, :]
        along = tl.sum(weighted * hat, axis=1)[:, None] / size
        out = scale * (weighted - hat * along)
        if grad_sum_ptr is not None:
            out += load_fp32(grad_sum_ptr + place, inside)
        tl.store(out_ptr + place, out, mask=inside)
        if low_ptr is not None:
            tl.store(low_ptr + place, out, mask=inside)
        weight_grad += tl.sum(grad * hat, axis=0)
    tl.store(partial_ptr + program_id_64(0) * size + column, weight_grad, mask=real)


@kernel
def _add_sums_kernel(partial_ptr, out_ptr, n_programs, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n_programs, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * size + column[None, :]
        total += load_masked(partial_ptr + place, (row < n_programs)[:, None] & inside[None, :])
    grad = load_masked(out_ptr + column, inside) + tl.sum(total, axis=0)
    tl.store(out_ptr + column, grad, mask=inside)
