# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
"""What the kernels of rows, of their backward pass and of a single token have in common. Letters as in the package.

What packed rows give to the rule: q, k, v and gates, in one kernel; and what they leave of their inputs.

A program has some tokens of one head of q, k or v, or the gates of these tokens. It reads a token's inputs once for
each place of the convolution, all but the first time from the processor's own cache. Letters as in the package.

The backward pass of `triton_rows.py`, in two kernels: back to the convolution's results, then through it.

Between them is the gradient of these results, which takes the place of the gradients of q, k and v. Each program of the
second kernel sums its tokens' part of the weights' gradients; the parts are added in a fixed order.
Letters as in the package; L blocks of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.parts import DeltaWeights, RowChunks
from areno.kernels.elementwise.triton_norm import add_sums
from areno.kernels.jit import kernel

LENGTH_EPS = tl.constexpr(1e-6)  # of the lengths of q and k, as in `reference.py`


def sizes_of(weights: DeltaWeights) -> dict[str, Any]:
    """Constants of the kernels of rows. A block is the power of two that holds a head, or all heads' gates."""
    key, value = weights.key_dim, weights.value_dim
    return {
        "KEY_HEADS": weights.n_key_heads,
        "HEADS": weights.n_heads,
        "KEY": key,
        "VALUE": value,
        "WIDTH": weights.conv_XW.shape[1],
        "KEY_BLOCK": triton.next_power_of_2(key),
        "VALUE_BLOCK": triton.next_power_of_2(value),
        "HEAD_BLOCK": triton.next_power_of_2(weights.n_heads),
    }


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as torch has it: x itself where it is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def rounded(x, ptr):
    """As it is kept in memory of this type, in fp32."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def convolved(
    proj_ptr, conv_ptr, before_ptr, rows_ptr, token, position, is_token, channel, is_channel,
    PROJ: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The convolution of some channels of some tokens, in the order of `triton.py`: the token, then the oldest."""
    inside = is_token[:, None] & is_channel[None, :]
    place = token.to(tl.int64)[:, None] * PROJ + channel[None, :]
    weight = tl.load(conv_ptr + channel * WIDTH + WIDTH - 1, mask=is_channel, other=0.0).to(tl.float32)
    total = tl.load(proj_ptr + place, mask=inside, other=0.0).to(tl.float32) * weight[None, :]
    for earlier in tl.static_range(WIDTH - 1):
        shift = WIDTH - 1 - earlier
        in_row = (position >= shift)[:, None]
        x = tl.load(proj_ptr + place - shift * PROJ, mask=inside & in_row, other=0.0).to(tl.float32)
        if before_ptr is not None:
            row = tl.load(rows_ptr + token, mask=is_token, other=0)
            kept = (row[:, None] * CHANNELS + channel[None, :]) * (WIDTH - 1) + earlier + position[:, None]
            x += tl.load(before_ptr + kept, mask=inside & (position < shift)[:, None], other=0.0).to(tl.float32)
        weight = tl.load(conv_ptr + channel * WIDTH + earlier, mask=is_channel, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    return total


TOKENS, WARPS = 32, 4  # of a program: of five, the fastest on an H200
_CHANNELS = 256  # of a program of `conv_states`


def conv_and_gates(
    proj_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, initial_RXw: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q (N, G, K) and k, normalised, and v (N, H, V), in the dtype given; decay and beta (N, H) in float32.

    proj_NP: contiguous. initial_RXw: inputs before the rows, where these do not begin with zeros.
    """
    n, sizes = len(proj_NP), sizes_of(weights)
    q_NGK = proj_NP.new_empty(n, weights.n_key_heads, weights.key_dim)
    k_NGK, v_NHV = torch.empty_like(q_NGK), proj_NP.new_empty(n, weights.n_heads, weights.value_dim)
    decay_NH = torch.empty(n, weights.n_heads, dtype=torch.float32, device=proj_NP.device)
    beta_NH = torch.empty_like(decay_NH)
    if n:
        _conv_and_gates_kernel[(triton.cdiv(n, TOKENS), 2 * weights.n_key_heads + weights.n_heads + 1)](
            proj_NP, weights.conv_XW, weights.A_log_H, weights.dt_bias_H,
            None if initial_RXw is None else initial_RXw.contiguous(), None if initial_RXw is None else chunks.rows_N,
            chunks.positions_N, q_NGK, k_NGK, v_NHV, decay_NH, beta_NH, n, weights.key_dim**-0.5,
            **sizes, TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return q_NGK, k_NGK, v_NHV, decay_NH, beta_NH


def conv_states(proj_NP: Tensor, initial_RXw: Tensor | None, weights: DeltaWeights, chunks: RowChunks) -> Tensor:
    """The last w inputs of each row, (R, X, w), those before the rows included; zeros before these."""
    n_rows, (n_channels, width) = len(chunks.lengths_R), weights.conv_XW.shape
    kept_RXw = proj_NP.new_empty(n_rows, n_channels, width - 1)
    if n_rows and width > 1:
        _conv_states_kernel[(n_rows, triton.cdiv(n_channels, _CHANNELS))](
            proj_NP, None if initial_RXw is None else initial_RXw.contiguous(), chunks.borders, kept_RXw,
            proj_NP.shape[1], n_channels, BEFORE=width - 1, BLOCK=_CHANNELS,
        )  # fmt: skip
    return kept_RXw


@kernel(do_not_specialize=["n"])
def _conv_and_gates_kernel(
    proj_ptr,
    conv_ptr,
    A_log_ptr,
    bias_ptr,
    before_ptr,
    rows_ptr,
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    n,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    PROJ: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < n
    position = tl.load(positions_ptr + token, mask=is_token, other=0)
    part = tl.program_id(1)
    if part < 2 * KEY_HEADS:
        key = tl.arange(0, KEY_BLOCK)
        x = convolved(
            proj_ptr, conv_ptr, before_ptr, rows_ptr, token, position, is_token, part * KEY + key, key < KEY,
            PROJ, CHANNELS, WIDTH,
        )  # fmt: skip
        x *= tl.sigmoid(x)
        x *= tl.rsqrt(tl.sum(x * x, axis=1) + LENGTH_EPS)[:, None]
        inside = is_token[:, None] & (key < KEY)[None, :]
        place = token.to(tl.int64)[:, None] * (KEY_HEADS * KEY) + key[None, :]
        if part < KEY_HEADS:
            tl.store(q_ptr + place + part * KEY, (x * scale).to(q_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(k_ptr + place + (part - KEY_HEADS) * KEY, x.to(k_ptr.dtype.element_ty), mask=inside)
    elif part < 2 * KEY_HEADS + HEADS:
        first = (part - 2 * KEY_HEADS) * VALUE
        value = tl.arange(0, VALUE_BLOCK)
        v = convolved(
            proj_ptr, conv_ptr, before_ptr, rows_ptr, token, position, is_token,
            2 * KEY_HEADS * KEY + first + value, value < VALUE, PROJ, CHANNELS, WIDTH,
        )  # fmt: skip
        v *= tl.sigmoid(v)
        v_place = token.to(tl.int64)[:, None] * (HEADS * VALUE) + first + value[None, :]
        tl.store(v_ptr + v_place, v.to(v_ptr.dtype.element_ty), mask=is_token[:, None] & (value < VALUE)[None, :])
    else:
        head = tl.arange(0, HEAD_BLOCK)
        is_head = is_token[:, None] & (head < HEADS)[None, :]
        given = proj_ptr + token.to(tl.int64)[:, None] * PROJ + CHANNELS + HEADS * VALUE + head[None, :]
        b = tl.load(given, mask=is_head, other=0.0).to(tl.float32)
        a = tl.load(given + HEADS, mask=is_head, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)[None, :]
        rate = tl.exp(tl.load(A_log_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32))[None, :]
        gate_place = token.to(tl.int64)[:, None] * HEADS + head[None, :]
        tl.store(decay_ptr + gate_place, -rate * softplus(a), mask=is_head)
        tl.store(beta_ptr + gate_place, tl.sigmoid(b), mask=is_head)


@kernel
def _conv_states_kernel(
    proj_ptr, before_ptr, borders_ptr, kept_ptr, proj_size, n_channels, BEFORE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < n_channels
    start, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    kept = (row * n_channels + channel) * BEFORE
    for place in tl.static_range(BEFORE):
        token = end - BEFORE + place + tl.zeros([BLOCK], tl.int64)
        x = tl.load(proj_ptr + token * proj_size + channel, mask=inside & (token >= start), other=0.0)
        if before_ptr is not None:
            earlier = kept + BEFORE + token - start
            x += tl.load(before_ptr + earlier, mask=inside & (token < start), other=0.0)
        tl.store(kept_ptr + kept + place, x, mask=inside)


BACKWARD_TOKENS, BACKWARD_WARPS = 16, 2  # of a program of the first kernel; the fastest of four on an H200
CONV_TOKENS, CONV_WARPS = 32, 4  # of the second


def conv_and_gates_backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    proj_NP: Tensor,
    weights: DeltaWeights,
    chunks: RowChunks,
    grad_proj_NP: Tensor,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Writes the gradients of x, b and a into that of what was given, whose part for z it leaves alone.

    grads: of q, k, v, decay and beta, contiguous; the first three are overwritten. Rows begin with zeros.
    Returns the gradients of the convolution's weights (X, W), of log_decay and bias (H,), float32, if they are wanted.
    """
    n, sizes, n_heads = len(proj_NP), sizes_of(weights), weights.n_heads
    grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH = grads
    n_blocks, n_parts = triton.cdiv(n, CONV_TOKENS), 2 * weights.n_key_heads + n_heads
    n_conv = weights.conv_XW.numel()
    sums_LD = of_conv_LD = of_gates_LD = None
    if of_weights:
        sums_LD = torch.empty(n_blocks, n_conv + 2 * n_heads, dtype=torch.float32, device=proj_NP.device)
        of_conv_LD, of_gates_LD = sums_LD, sums_LD[:, n_conv:]
    if n:
        _before_heads_kernel[(triton.cdiv(n, BACKWARD_TOKENS), n_parts)](
            proj_NP, weights.conv_XW, chunks.positions_N, grad_q_NGK, grad_k_NGK, grad_v_NHV, n, weights.key_dim**-0.5,
            **sizes, BACKWARD_TOKENS=BACKWARD_TOKENS, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
        _before_convolution_kernel[(n_blocks, n_parts + 1)](
            proj_NP, weights.conv_XW, weights.A_log_H, weights.dt_bias_H, chunks.positions_N,
            grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH, grad_proj_NP, of_conv_LD, of_gates_LD,
            n, n_conv + 2 * n_heads,
            **sizes, BACKWARD_TOKENS=CONV_TOKENS, num_warps=CONV_WARPS,
        )  # fmt: skip
    if sums_LD is None:
        return None
    grad_D = sums_LD.new_zeros(sums_LD.shape[1])
    add_sums(sums_LD, grad_D)
    grad_conv, grad_A_log_H, grad_dt_bias_H = grad_D.split((n_conv, n_heads, n_heads))
    return grad_conv.view(weights.conv_XW.shape), grad_A_log_H, grad_dt_bias_H


@triton.jit
def _silu_gradient(x):
    sigmoid = tl.sigmoid(x)
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


@triton.jit
def _before_key(grad_ptr, place, inside, x, scale):
    """The gradient of the convolution's result x of a head that is normalised, in the place of the head's own."""
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * scale
    key = x * tl.sigmoid(x)
    per_length = tl.rsqrt(tl.sum(key * key, axis=1) + LENGTH_EPS)[:, None]
    key *= per_length
    along = tl.sum(grad * key, axis=1)[:, None]
    grad = per_length * (grad - key * along) * _silu_gradient(x)
    tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["n"])
def _before_heads_kernel(
    proj_ptr,
    conv_ptr,
    positions_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    n,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BACKWARD_TOKENS: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    PROJ: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    token = tl.program_id(0) * BACKWARD_TOKENS + tl.arange(0, BACKWARD_TOKENS)
    is_token = token < n
    position = tl.load(positions_ptr + token, mask=is_token, other=0)
    part = tl.program_id(1)
    if part < 2 * KEY_HEADS:
        key = tl.arange(0, KEY_BLOCK)
        x = convolved(
            proj_ptr,
            conv_ptr,
            None,
            None,
            token,
            position,
            is_token,
            part * KEY + key,
            key < KEY,
            PROJ,
            CHANNELS,
            WIDTH,
        )
        inside = is_token[:, None] & (key < KEY)[None, :]
        place = token.to(tl.int64)[:, None] * (KEY_HEADS * KEY) + key[None, :]
        if part < KEY_HEADS:
            _before_key(grad_q_ptr, place + part * KEY, inside, x, scale)
        else:
            _before_key(grad_k_ptr, place + (part - KEY_HEADS) * KEY, inside, x, 1.0)
    else:
        first = (part - 2 * KEY_HEADS) * VALUE
        value = tl.arange(0, VALUE_BLOCK)
        v = convolved(
            proj_ptr, conv_ptr, None, None, token, position, is_token,
            2 * KEY_HEADS * KEY + first + value, value < VALUE, PROJ, CHANNELS, WIDTH,
        )  # fmt: skip
        is_value = is_token[:, None] & (value < VALUE)[None, :]
        v_place = grad_v_ptr + token.to(tl.int64)[:, None] * (HEADS * VALUE) + first + value[None, :]
        grad = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32) * _silu_gradient(v)
        tl.store(v_place, grad.to(grad_v_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def _before_convolution(
    proj_ptr, conv_ptr, positions_ptr, grad_ptr, out_ptr, sums_ptr, first, dim, n, size, channel, is_channel,
    PROJ: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BACKWARD_TOKENS: tl.constexpr,
):  # fmt: skip
    """Of the channels of one head. first: where its gradients are among the STRIDE ones of a token in `grad_ptr`.

    The token n gets from the token n + shift, if this one is of the same row, and so do the weights.
    """
    token = tl.program_id(0) * BACKWARD_TOKENS + tl.arange(0, BACKWARD_TOKENS)
    inside = (token < n)[:, None] & is_channel[None, :]
    given = token.to(tl.int64)[:, None] * PROJ + channel[None, :]
    place = token.to(tl.int64)[:, None] * STRIDE + first + dim[None, :]
    if sums_ptr is not None:
        x = tl.load(proj_ptr + given, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros(inside.shape, tl.float32)
    for shift in tl.static_range(WIDTH):
        position = tl.load(positions_ptr + token + shift, mask=token + shift < n, other=-1)
        seen = (position >= shift)[:, None] & inside
        grad = tl.load(grad_ptr + place + shift * STRIDE, mask=seen, other=0.0).to(tl.float32)
        weight = conv_ptr + channel * WIDTH + WIDTH - 1 - shift
        total += grad * tl.load(weight, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if sums_ptr is not None:
            sums = sums_ptr + tl.program_id(0).to(tl.int64) * size + channel * WIDTH + WIDTH - 1 - shift
            tl.store(sums, tl.sum(grad * x, axis=0), mask=is_channel)
    tl.store(out_ptr + given, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["n"])
def _before_convolution_kernel(
    proj_ptr,
    conv_ptr,
    A_log_ptr,
    bias_ptr,
    positions_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_decay_ptr,
    grad_beta_ptr,
    out_ptr,
    conv_sums_ptr,
    gate_sums_ptr,
    n,
    size,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BACKWARD_TOKENS: tl.constexpr,
):
    """And through the gates. size: of what a block of tokens leaves of the weights' gradients."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    PROJ: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    part = tl.program_id(1)
    if part < 2 * KEY_HEADS:
        key = tl.arange(0, KEY_BLOCK)
        if part < KEY_HEADS:
            _before_convolution(
                proj_ptr, conv_ptr, positions_ptr, grad_q_ptr, out_ptr, conv_sums_ptr, part * KEY, key, n, size,
                part * KEY + key, key < KEY, PROJ, KEY_HEADS * KEY, WIDTH, BACKWARD_TOKENS,
            )  # fmt: skip
        else:
            _before_convolution(
                proj_ptr, conv_ptr, positions_ptr, grad_k_ptr, out_ptr, conv_sums_ptr, (part - KEY_HEADS) * KEY, key, n,
                size, part * KEY + key, key < KEY, PROJ, KEY_HEADS * KEY, WIDTH, BACKWARD_TOKENS,
            )  # fmt: skip
    elif part < 2 * KEY_HEADS + HEADS:
        first = (part - 2 * KEY_HEADS) * VALUE
        value = tl.arange(0, VALUE_BLOCK)
        _before_convolution(
            proj_ptr, conv_ptr, positions_ptr, grad_v_ptr, out_ptr, conv_sums_ptr, first, value, n, size,
            2 * KEY_HEADS * KEY + first + value, value < VALUE, PROJ, HEADS * VALUE, WIDTH, BACKWARD_TOKENS,
        )  # fmt: skip
    else:
        token = tl.program_id(0) * BACKWARD_TOKENS + tl.arange(0, BACKWARD_TOKENS)
        head = tl.arange(0, HEAD_BLOCK)
        inside = (token < n)[:, None] & (head < HEADS)[None, :]
        given = token.to(tl.int64)[:, None] * PROJ + CHANNELS + HEADS * VALUE + head[None, :]
        place = token.to(tl.int64)[:, None] * HEADS + head[None, :]
        b = tl.load(proj_ptr + given, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(proj_ptr + given + HEADS, mask=inside, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)[None, :]
        rate = tl.exp(tl.load(A_log_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32))[None, :]
        grad_decay = tl.load(grad_decay_ptr + place, mask=inside, other=0.0) * -rate
        beta = tl.sigmoid(b)
        grad_b = tl.load(grad_beta_ptr + place, mask=inside, other=0.0) * beta * (1.0 - beta)
        grad_a = grad_decay * tl.sigmoid(a)
        tl.store(out_ptr + given, grad_b.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + given + HEADS, grad_a.to(out_ptr.dtype.element_ty), mask=inside)
        if gate_sums_ptr is not None:
            sums = gate_sums_ptr + tl.program_id(0).to(tl.int64) * size + head
            tl.store(sums, tl.sum(grad_decay * softplus(a), axis=0), mask=head < HEADS)
            tl.store(sums + HEADS, tl.sum(grad_a, axis=0), mask=head < HEADS)
