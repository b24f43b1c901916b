# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""RMS norm and rotary embedding of each query and key head, and rounding of keys and values, as one Triton kernel.

The plain forms are in `areno/layers/norm.py` and `areno/layers/rotary.py`. X = (H + 2 K) C: queries, keys and values of
all heads, side by side. If `gated`, each query has its gate behind it, which is not read: X = (2 H + 2 K) C. Cosines
and sines are float32, for half the head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.elementwise.triton_norm import add_sums, n_multiprocessors
from areno.kernels.fp8.triton import round_halves_to_fp8
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64, round_to_dtype

QK_PROGRAMS, QK_WARPS = 4, 2  # of the backward kernel: programs for each multiprocessor, warps of a program


def qk_norm_rope(
    qkv_NX: Tensor,
    cos_N1F: Tensor,
    sin_N1F: Tensor,
    q_weight_C: Tensor | None,
    k_weight_C: Tensor | None,
    eps: float,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    plus_one: bool = False,
    fp8_kv: bool = False,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q (N, H, C) and k (N, K, C), and v, a view of `qkv_NX`. A weight of None means no norm.

    With `fp8_kv`, rotated keys and values are rounded to FP8, and v is not a view. `qk_norm_rope_backward` is for both.
    """
    n = qkv_NX.shape[0]
    q_NHC = qkv_NX.new_empty((n, n_heads, head_dim))
    k_NKC = qkv_NX.new_empty((n, n_kv_heads, head_dim))
    v_NKC = qkv_NX[:, -n_kv_heads * head_dim :].unflatten(-1, (n_kv_heads, head_dim))
    if fp8_kv:
        v_NKC = torch.empty_like(k_NKC)
    if n:
        _qk_norm_rope_kernel[(n,)](
            qkv_NX,
            cos_N1F,
            sin_N1F,
            q_weight_C,
            k_weight_C,
            q_NHC,
            k_NKC,
            v_NKC if fp8_kv else None,
            qkv_NX.stride(0),
            eps,
            **_sizes(n_heads, n_kv_heads, head_dim),
            PLUS_ONE=plus_one,
            GATED=gated,
            num_warps=4,
            **jit.pdl_options(qkv_NX.device),
        )
    return q_NHC, k_NKC, v_NKC


def qk_norm_rope_backward(
    grad_q_NHC: Tensor,
    grad_k_NKC: Tensor,
    grad_v_NKC: Tensor,
    qkv_NX: Tensor,
    cos_N1F: Tensor,
    sin_N1F: Tensor,
    q_weight_C: Tensor | None,
    k_weight_C: Tensor | None,
    eps: float,
    plus_one: bool = False,
    grad_gated_NX: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of qkv and of both norms' weights ((C,) float32 each, or None without norms).

    If gated, `grad_gated_NX` receives the gradient of qkv, and has that of the gates already.
    """
    n, n_heads, head_dim = grad_q_NHC.shape
    n_kv_heads = grad_k_NKC.shape[1]
    grad_qkv_NX = grad_gated_NX
    if grad_qkv_NX is None:
        grad_qkv_NX = torch.empty_like(qkv_NX, memory_format=torch.contiguous_format)
    has_norm = q_weight_C is not None
    # With fewer programs there are fewer partial sums to add, but several for each multiprocessor hide load latency.
    n_programs = max(1, min(n, QK_PROGRAMS * n_multiprocessors(qkv_NX.device)))
    partial_P2C = qkv_NX.new_zeros((n_programs, 2, head_dim), dtype=torch.float32) if has_norm else grad_qkv_NX
    if n:
        _qk_norm_rope_backward_kernel[(n_programs,)](
            grad_q_NHC.contiguous(),
            grad_k_NKC.contiguous(),
            grad_v_NKC.contiguous(),
            qkv_NX,
            cos_N1F,
            sin_N1F,
            q_weight_C,
            k_weight_C,
            grad_qkv_NX,
            partial_P2C,
            n,
            qkv_NX.stride(0),
            eps,
            **_sizes(n_heads, n_kv_heads, head_dim),
            PLUS_ONE=plus_one,
            GATED=grad_gated_NX is not None,
            num_warps=QK_WARPS,
        )
    if not has_norm:
        return grad_qkv_NX, None, None
    grad_2C = partial_P2C.new_zeros((2, head_dim))
    add_sums(partial_P2C.flatten(1), grad_2C.view(-1))
    return grad_qkv_NX, grad_2C[0], grad_2C[1]


def _sizes(n_heads: int, n_kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "HEADS": n_heads,
        "KV_HEADS": n_kv_heads,
        "HALF": head_dim // 2,
        "HEADS_BLOCK": triton.next_power_of_2(n_heads + n_kv_heads),
        "KV_BLOCK": triton.next_power_of_2(n_kv_heads),
        "HALF_BLOCK": triton.next_power_of_2(head_dim // 2),
    }


@kernel
def _qk_norm_rope_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        jit.launch_dependents()
    row = program_id_64(0)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    inside = (head < HEADS + KV_HEADS) & (half < HALF)
    GATES: tl.constexpr = HEADS * GATED
    place = qkv_ptr + row * qkv_stride + (head + tl.minimum(head, GATES)) * (2 * HALF) + half
    if PDL:
        jit.wait_for_previous()
    a = load_fp32(place, inside)
    b = load_fp32(place + HALF, inside)
    if q_weight_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        weight_a = _load_norm_weights(q_weight_ptr, k_weight_ptr, is_q, half, half < HALF, PLUS_ONE)
        weight_b = _load_norm_weights(q_weight_ptr, k_weight_ptr, is_q, half + HALF, half < HALF, PLUS_ONE)
        a = round_to_dtype(a * scale * weight_a, q_ptr)
        b = round_to_dtype(b * scale * weight_b, q_ptr)
    cos = load_masked(cos_ptr + row * HALF + half, half < HALF)
    sin = load_masked(sin_ptr + row * HALF + half, half < HALF)
    first = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
    second = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    if v_ptr is not None:
        rounded_first, rounded_second = round_halves_to_fp8(first.to(tl.float32), second.to(tl.float32))
        first = tl.where(is_k, rounded_first.to(first.dtype), first)
        second = tl.where(is_k, rounded_second.to(second.dtype), second)
        kv_head = tl.arange(0, KV_BLOCK)[:, None]
        kv_inside = (kv_head < KV_HEADS) & (half < HALF)
        v_place = qkv_ptr + row * qkv_stride + (GATES + HEADS + KV_HEADS + kv_head) * (2 * HALF) + half
        a, b = round_halves_to_fp8(load_fp32(v_place, kv_inside), load_fp32(v_place + HALF, kv_inside))
        v_place = v_ptr + row * (KV_HEADS * 2 * HALF) + kv_head * (2 * HALF) + half
        tl.store(v_place, a, mask=kv_inside)
        tl.store(v_place + HALF, b, mask=kv_inside)
    q_place = q_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + half
    tl.store(q_place, first, mask=inside & is_q)
    tl.store(q_place + HALF, second, mask=inside & is_q)
    k_place = k_ptr + row * (KV_HEADS * 2 * HALF) + (head - HEADS) * (2 * HALF) + half
    tl.store(k_place, first, mask=inside & is_k)
    tl.store(k_place + HALF, second, mask=inside & is_k)


@triton.jit
def _load_norm_weights(q_weight_ptr, k_weight_ptr, is_q, place, inside, PLUS_ONE: tl.constexpr):
    q_weight = load_fp32(q_weight_ptr + place, inside)
    k_weight = load_fp32(k_weight_ptr + place, inside)
    weight = tl.where(is_q, q_weight, k_weight)
    if PLUS_ONE:
        weight += 1.0
    return weight


@kernel
def _qk_norm_rope_backward_kernel(
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    partial_ptr,
    n,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GATED: tl.constexpr,
):
    """In program i of P, compute tokens i, i + P, ..., and partial sums of the norm weights' gradients."""
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    real = half < HALF
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    inside = (head < HEADS + KV_HEADS) & real
    kv_head = tl.arange(0, KV_BLOCK)[:, None]
    kv_inside = (kv_head < KV_HEADS) & real
    C: tl.constexpr = 2 * HALF
    GATES: tl.constexpr = HEADS * GATED
    column_of_head = (head + tl.minimum(head, GATES)) * C + half
    sum_a = tl.zeros([HEADS_BLOCK, HALF_BLOCK], tl.float32)
    sum_b = tl.zeros([HEADS_BLOCK, HALF_BLOCK], tl.float32)
    if q_weight_ptr is not None:
        weight_a = _load_norm_weights(q_weight_ptr, k_weight_ptr, is_q, half, real, PLUS_ONE)
        weight_b = _load_norm_weights(q_weight_ptr, k_weight_ptr, is_q, half + HALF, real, PLUS_ONE)
    for token in range(tl.program_id(0), n, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        cos = load_masked(cos_ptr + row * HALF + half, real)
        sin = load_masked(sin_ptr + row * HALF + half, real)
        q_place = grad_q_ptr + row * (HEADS * C) + head * C + half
        k_place = grad_k_ptr + row * (KV_HEADS * C) + (head - HEADS) * C + half
        first = load_fp32(q_place, is_q & real)
        first += load_fp32(k_place, is_k & real)
        second = load_fp32(q_place + HALF, is_q & real)
        second += load_fp32(k_place + HALF, is_k & real)
        # The gradient of a rotation is the inverse rotation.
        a_grad = first * cos + second * sin
        b_grad = second * cos - first * sin
        if q_weight_ptr is not None:
            place = qkv_ptr + row * qkv_stride + column_of_head
            a = load_fp32(place, inside)
            b = load_fp32(place + HALF, inside)
            scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / C + eps)[:, None]
            a *= scale
            b *= scale
            sum_a += a_grad * a
            sum_b += b_grad * b
            a_grad *= weight_a
            b_grad *= weight_b
            along = ((tl.sum(a_grad * a, axis=1) + tl.sum(b_grad * b, axis=1)) / C)[:, None]
            a_grad = scale * (a_grad - a * along)
            b_grad = scale * (b_grad - b * along)
        out_row = out_ptr + row * ((GATES + HEADS + 2 * KV_HEADS) * C)
        tl.store(out_row + column_of_head, a_grad, mask=inside)
        tl.store(out_row + column_of_head + HALF, b_grad, mask=inside)
        v_place = grad_v_ptr + row * (KV_HEADS * C) + kv_head * C + half
        v_out = out_row + (GATES + HEADS + KV_HEADS + kv_head) * C + half
        tl.store(v_out, load_masked(v_place, kv_inside), mask=kv_inside)
        tl.store(v_out + HALF, load_masked(v_place + HALF, kv_inside), mask=kv_inside)
    if q_weight_ptr is not None:
        column = tl.arange(0, HALF_BLOCK)
        q_out = partial_ptr + program_id_64(0) * (2 * C) + column
        keep = column < HALF
        tl.store(q_out, tl.sum(tl.where(is_q, sum_a, 0.0), axis=0), mask=keep)
        tl.store(q_out + HALF, tl.sum(tl.where(is_q, sum_b, 0.0), axis=0), mask=keep)
        tl.store(q_out + C, tl.sum(tl.where(is_k, sum_a, 0.0), axis=0), mask=keep)
        tl.store(q_out + C + HALF, tl.sum(tl.where(is_k, sum_b, 0.0), axis=0), mask=keep)
