# The language of Triton kernels is not Python's, whatever it looks like to a type checker:
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The elementwise stretches between the matrix products of a layer, each as one Triton kernel, and their gradients.

What they compute, and where they round, is what the plain layers do: `layers/norm.py`, `layers/rotary.py` and the gated
MLP of `models/transformer.py`; tests hold them to those. All arithmetic is fp32. Nothing here depends on numbers of one
step other than the shapes, so launches can be captured in a CUDA graph; nothing adds up in an order left to chance.

Shape letters: N tokens, D hidden size, H query heads, K key heads, C head dimension, F = C / 2, I inner size.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Backward kernels loop over tokens, since they sum weight gradients: elements worked on at once, programs for each
# processor of the device, warps of a program. The fastest on an H200 at hidden sizes of 1024, 2560 and 4096.
NORM_TILE, NORM_PROGRAMS, NORM_WARPS = 8192, 2, 4
QK_PROGRAMS, QK_WARPS = 4, 2


def add_rms_norm(x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta (in the dtype of x; x itself without delta) and its norm (in that of the weight).

    The norm is that of the rounded sum, as if the two had been separate.
    """
    x_ND = x_ND.contiguous()
    n, size = x_ND.shape
    normed_ND = torch.empty_like(x_ND, dtype=weight_D.dtype)
    sum_ND = x_ND
    if delta_ND is not None:
        delta_ND = delta_ND.contiguous()
        sum_ND = torch.empty_like(x_ND)
    if n:
        block = triton.next_power_of_2(size)
        _add_norm_kernel[(n,)](
            x_ND,
            x_ND if delta_ND is None else delta_ND,
            sum_ND,
            weight_D,
            normed_ND,
            size,
            eps,
            HAS_DELTA=delta_ND is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )
    return sum_ND, normed_ND


def rms_norm_backward(
    grad_ND: Tensor,
    grad_sum_ND: Tensor | None,
    sum_ND: Tensor,
    weight_D: Tensor,
    eps: float,
    weight_grad_D: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradient of the stream: that of its norm (grad), plus what it gets elsewhere (grad_sum). In the dtype of sum, and
    in that of grad, which may be the same tensor.

    weight_grad_D: float32; the weight's gradient is added into it.
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
    n_programs = min(triton.cdiv(n, rows), NORM_PROGRAMS * _n_processors(sum_ND.device))
    partial_PD = sum_ND.new_empty((n_programs, size), dtype=torch.float32)
    _norm_backward_kernel[(n_programs,)](
        grad_ND,
        grad_ND if grad_sum_ND is None else grad_sum_ND.contiguous(),
        sum_ND,
        weight_D,
        out_ND,
        low_ND,
        partial_PD,
        n,
        size,
        eps,
        HAS_SUM=grad_sum_ND is not None,
        HAS_LOW=low_ND is not out_ND,
        ROWS=rows,
        BLOCK=block,
        num_warps=NORM_WARPS,
    )
    if weight_grad_D is not None:
        _add_sums(partial_PD, weight_grad_D)
    return out_ND, low_ND


def _add_sums(partial_PD: Tensor, out_D: Tensor) -> None:
    """out += sum over programs, in a fixed order."""
    n_programs, size = partial_PD.shape
    _add_sums_kernel[(triton.cdiv(size, 32),)](partial_PD, out_D, n_programs, size, ROWS=128, BLOCK=32, num_warps=8)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """q_NHC and k_NKC, each head normalised (where there are weights) and rotated, and v_NKC, a view of qkv.

    qkv_NX: the heads of q, k and v side by side, X = (H + 2 K) C.
    """
    n = qkv_NX.shape[0]
    q_NHC = qkv_NX.new_empty((n, n_heads, head_dim))
    k_NKC = qkv_NX.new_empty((n, n_kv_heads, head_dim))
    v_NKC = qkv_NX[:, (n_heads + n_kv_heads) * head_dim :].unflatten(-1, (n_kv_heads, head_dim))
    if n:
        has_norm = q_weight_C is not None
        _qk_norm_rope_kernel[(n,)](
            qkv_NX,
            cos_N1F,
            sin_N1F,
            q_weight_C if has_norm else cos_N1F,
            k_weight_C if has_norm else cos_N1F,
            q_NHC,
            k_NKC,
            qkv_NX.stride(0),
            eps,
            HEADS=n_heads,
            KV_HEADS=n_kv_heads,
            HALF=head_dim // 2,
            HAS_NORM=has_norm,
            HEADS_BLOCK=triton.next_power_of_2(n_heads + n_kv_heads),
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of qkv, and of the two norm weights, (C,) float32 each; None without norms."""
    n, n_heads, head_dim = grad_q_NHC.shape
    n_kv_heads = grad_k_NKC.shape[1]
    grad_qkv_NX = torch.empty_like(qkv_NX, memory_format=torch.contiguous_format)
    has_norm = q_weight_C is not None
    # Long loops cost less than a wide sum over programs, but some programs per processor hide the latency of loads.
    n_programs = max(1, min(n, QK_PROGRAMS * _n_processors(qkv_NX.device)))
    partial_P2C = qkv_NX.new_zeros((n_programs, 2, head_dim), dtype=torch.float32) if has_norm else grad_qkv_NX
    if n:
        _qk_norm_rope_backward_kernel[(n_programs,)](
            grad_q_NHC.contiguous(),
            grad_k_NKC.contiguous(),
            grad_v_NKC.contiguous(),
            qkv_NX,
            cos_N1F,
            sin_N1F,
            q_weight_C if has_norm else cos_N1F,
            k_weight_C if has_norm else cos_N1F,
            grad_qkv_NX,
            partial_P2C,
            n,
            qkv_NX.stride(0),
            eps,
            HEADS=n_heads,
            KV_HEADS=n_kv_heads,
            HALF=head_dim // 2,
            HAS_NORM=has_norm,
            HEADS_BLOCK=triton.next_power_of_2(n_heads + n_kv_heads),
            KV_BLOCK=triton.next_power_of_2(n_kv_heads),
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=QK_WARPS,
        )
    if not has_norm:
        return grad_qkv_NX, None, None
    grad_2C = partial_P2C.new_zeros((2, head_dim))
    _add_sums(partial_P2C.flatten(1), grad_2C.view(-1))
    return grad_qkv_NX, grad_2C[0], grad_2C[1]


def swiglu(gate_up_N2I: Tensor) -> Tensor:
    """silu(gate) * up, (N, I), of gate and up side by side."""
    n, inner = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    out_NI = gate_up_N2I.new_empty((n, inner))
    if n:
        _swiglu_kernel[(n, triton.cdiv(inner, 1024))](gate_up_N2I.contiguous(), out_NI, inner, BLOCK=1024)
    return out_NI


def swiglu_backward(grad_NI: Tensor, gate_up_N2I: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of gate and up side by side, and the forward result once more, which costs no pass of its own here."""
    n, inner = grad_NI.shape
    grad_gate_up_N2I = torch.empty_like(gate_up_N2I)
    out_NI = torch.empty_like(grad_NI)
    if n:
        _swiglu_backward_kernel[(n, triton.cdiv(inner, 1024))](
            grad_NI.contiguous(), gate_up_N2I.contiguous(), grad_gate_up_N2I, out_NI, inner, BLOCK=1024
        )
    return grad_gate_up_N2I, out_NI


@functools.cache
def _n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, sum_ptr, weight_ptr, normed_ptr, size, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * size + column, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
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
    HAS_SUM: tl.constexpr,
    HAS_LOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes every n_programs-th tile of ROWS rows and sums its share of the weight's gradient."""
    column = tl.arange(0, BLOCK)
    real = column < size
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & real[None, :]
        place = row.to(tl.int64)[:, None] * size + column[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]
        hat = x * scale
        weighted = grad * weight[None, :]
        along = tl.sum(weighted * hat, axis=1)[:, None] / size
        out = scale * (weighted - hat * along)
        if HAS_SUM:
            out += tl.load(grad_sum_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)
        if HAS_LOW:
            tl.store(low_ptr + place, out.to(low_ptr.dtype.element_ty), mask=inside)
        weight_grad += tl.sum(grad * hat, axis=0)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * size + column, weight_grad, mask=real)


@triton.jit
def _add_sums_kernel(partial_ptr, out_ptr, n_programs, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n_programs, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * size + column[None, :]
        total += tl.load(partial_ptr + place, mask=(row < n_programs)[:, None] & inside[None, :], other=0.0)
    grad = tl.load(out_ptr + column, mask=inside, other=0.0) + tl.sum(total, axis=0)
    tl.store(out_ptr + column, grad, mask=inside)


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_ptr,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    inside = (head < HEADS + KV_HEADS) & (half < HALF)
    place = qkv_ptr + row * qkv_stride + head * (2 * HALF) + half
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        weight_a = _weights(q_weight_ptr, k_weight_ptr, is_q, half, half < HALF)
        weight_b = _weights(q_weight_ptr, k_weight_ptr, is_q, half + HALF, half < HALF)
        a = (a * scale * weight_a).to(q_ptr.dtype.element_ty).to(tl.float32)
        b = (b * scale * weight_b).to(q_ptr.dtype.element_ty).to(tl.float32)
    cos = tl.load(cos_ptr + row * HALF + half, mask=half < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + half, mask=half < HALF, other=0.0)
    first = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
    second = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    q_place = q_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + half
    tl.store(q_place, first, mask=inside & is_q)
    tl.store(q_place + HALF, second, mask=inside & is_q)
    k_place = k_ptr + row * (KV_HEADS * 2 * HALF) + (head - HEADS) * (2 * HALF) + half
    tl.store(k_place, first, mask=inside & is_k)
    tl.store(k_place + HALF, second, mask=inside & is_k)


@triton.jit
def _weights(q_weight_ptr, k_weight_ptr, is_q, place, inside):
    """The norm weight of each head's kind."""
    q_weight = tl.load(q_weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight, k_weight)


@triton.jit
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
    HAS_NORM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Each program takes every n_programs-th token and sums its share of the weights' gradients."""
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    real = half < HALF
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    inside = (head < HEADS + KV_HEADS) & real
    kv_head = tl.arange(0, KV_BLOCK)[:, None]
    kv_inside = (kv_head < KV_HEADS) & real
    C: tl.constexpr = 2 * HALF
    dtype = out_ptr.dtype.element_ty
    sum_a = tl.zeros([HEADS_BLOCK, HALF_BLOCK], tl.float32)
    sum_b = tl.zeros([HEADS_BLOCK, HALF_BLOCK], tl.float32)
    if HAS_NORM:
        weight_a = _weights(q_weight_ptr, k_weight_ptr, is_q, half, real)
        weight_b = _weights(q_weight_ptr, k_weight_ptr, is_q, half + HALF, real)
    for token in range(tl.program_id(0), n, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        cos = tl.load(cos_ptr + row * HALF + half, mask=real, other=0.0)
        sin = tl.load(sin_ptr + row * HALF + half, mask=real, other=0.0)
        q_place = grad_q_ptr + row * (HEADS * C) + head * C + half
        k_place = grad_k_ptr + row * (KV_HEADS * C) + (head - HEADS) * C + half
        first = tl.load(q_place, mask=is_q & real, other=0.0).to(tl.float32)
        first += tl.load(k_place, mask=is_k & real, other=0.0).to(tl.float32)
        second = tl.load(q_place + HALF, mask=is_q & real, other=0.0).to(tl.float32)
        second += tl.load(k_place + HALF, mask=is_k & real, other=0.0).to(tl.float32)
        # The gradient of a rotation is the rotation back.
        a_grad = first * cos + second * sin
        b_grad = second * cos - first * sin
        if HAS_NORM:
            place = qkv_ptr + row * qkv_stride + head * C + half
            a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
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
        out_row = out_ptr + row * ((HEADS + 2 * KV_HEADS) * C)
        tl.store(out_row + head * C + half, a_grad.to(dtype), mask=inside)
        tl.store(out_row + head * C + HALF + half, b_grad.to(dtype), mask=inside)
        v_place = grad_v_ptr + row * (KV_HEADS * C) + kv_head * C + half
        v_out = out_row + (HEADS + KV_HEADS + kv_head) * C + half
        tl.store(v_out, tl.load(v_place, mask=kv_inside, other=0.0), mask=kv_inside)
        tl.store(v_out + HALF, tl.load(v_place + HALF, mask=kv_inside, other=0.0), mask=kv_inside)
    if HAS_NORM:
        column = tl.arange(0, HALF_BLOCK)
        q_out = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * C) + column
        keep = column < HALF
        tl.store(q_out, tl.sum(tl.where(is_q, sum_a, 0.0), axis=0), mask=keep)
        tl.store(q_out + HALF, tl.sum(tl.where(is_q, sum_b, 0.0), axis=0), mask=keep)
        tl.store(q_out + C, tl.sum(tl.where(is_k, sum_a, 0.0), axis=0), mask=keep)
        tl.store(q_out + C + HALF, tl.sum(tl.where(is_k, sum_b, 0.0), axis=0), mask=keep)


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place = gate_up_ptr + row * (2 * inner) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + inner, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * inner + column, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(grad_ptr, gate_up_ptr, grad_gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    dtype = out_ptr.dtype.element_ty
    place = row * (2 * inner) + column
    gate = tl.load(gate_up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + place + inner, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = (gate * sigmoid).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * inner + column, (silu * up).to(dtype), mask=inside)
    gate_grad = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_up_ptr + place, gate_grad.to(dtype), mask=inside)
    tl.store(grad_gate_up_ptr + place + inner, (grad * silu).to(dtype), mask=inside)
