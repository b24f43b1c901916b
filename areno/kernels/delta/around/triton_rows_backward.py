# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""The backward pass of `triton_rows.py`, in two kernels: back to the convolution's results, then through it.

Between them is the gradient of these results, which takes the place of the gradients of q, k and v. Each program of the
second kernel sums its tokens' part of the weights' gradients; the parts are added in a fixed order.
Letters as in the package; L blocks of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.around.triton_parts import LENGTH_EPS, convolved, sizes_of, softplus
from areno.kernels.delta.parts import DeltaWeights
from areno.kernels.delta.row_chunks import RowChunks
from areno.kernels.elementwise.triton_norm import add_sums
from areno.kernels.jit import kernel

TOKENS, WARPS = 16, 2  # of a program of the first kernel; the fastest of four on an H200
CONV_TOKENS, CONV_WARPS = 32, 4  # of the second


def mixed_rows_backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    given_NP: Tensor,
    weights: DeltaWeights,
    chunks: RowChunks,
    grad_given_NP: Tensor,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Writes the gradients of x, b and a into that of what was given, whose part for z it leaves alone.

    grads: of q, k, v, decay and beta, contiguous; the first three are overwritten. Rows begin with zeros.
    Returns the gradients of the convolution's weights (X, W), of log_decay and bias (H,), float32, if they are wanted.
    """
    n, sizes, n_heads = len(given_NP), sizes_of(weights), weights.n_heads
    grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH = grads
    n_blocks, n_parts = triton.cdiv(n, CONV_TOKENS), 2 * weights.n_key_heads + n_heads
    n_conv = weights.conv_XW.numel()
    sums_LD = of_conv_LD = of_gates_LD = None
    if of_weights:
        sums_LD = torch.empty(n_blocks, n_conv + 2 * n_heads, dtype=torch.float32, device=given_NP.device)
        of_conv_LD, of_gates_LD = sums_LD, sums_LD[:, n_conv:]
    if n:
        _before_heads_kernel[(triton.cdiv(n, TOKENS), n_parts)](
            given_NP, weights.conv_XW, chunks.ages_N, grad_q_NGK, grad_k_NGK, grad_v_NHV, n, weights.key_dim**-0.5,
            **sizes, TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip
        _before_convolution_kernel[(n_blocks, n_parts + 1)](
            given_NP, weights.conv_XW, weights.log_decay_H, weights.bias_H, chunks.ages_N,
            grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH, grad_given_NP, of_conv_LD, of_gates_LD,
            n, n_conv + 2 * n_heads,
            **sizes, TOKENS=CONV_TOKENS, num_warps=CONV_WARPS,
        )  # fmt: skip
    if sums_LD is None:
        return None
    grad_D = sums_LD.new_zeros(sums_LD.shape[1])
    add_sums(sums_LD, grad_D)
    grad_conv, grad_log_decay_H, grad_bias_H = grad_D.split((n_conv, n_heads, n_heads))
    return grad_conv.view(weights.conv_XW.shape), grad_log_decay_H, grad_bias_H


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
    given_ptr,
    conv_ptr,
    ages_ptr,
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
    TOKENS: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    GIVEN: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < n
    age = tl.load(ages_ptr + token, mask=is_token, other=0)
    part = tl.program_id(1)
    if part < 2 * KEY_HEADS:
        key = tl.arange(0, KEY_BLOCK)
        x = convolved(
            given_ptr, conv_ptr, None, None, token, age, is_token, part * KEY + key, key < KEY, GIVEN, CHANNELS, WIDTH
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
            given_ptr, conv_ptr, None, None, token, age, is_token,
            2 * KEY_HEADS * KEY + first + value, value < VALUE, GIVEN, CHANNELS, WIDTH,
        )  # fmt: skip
        is_value = is_token[:, None] & (value < VALUE)[None, :]
        v_place = grad_v_ptr + token.to(tl.int64)[:, None] * (HEADS * VALUE) + first + value[None, :]
        grad = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32) * _silu_gradient(v)
        tl.store(v_place, grad.to(grad_v_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def _before_convolution(
    given_ptr, conv_ptr, ages_ptr, grad_ptr, out_ptr, sums_ptr, first, dim, n, size, channel, is_channel,
    GIVEN: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Of the channels of one head. first: where its gradients are among the STRIDE ones of a token in `grad_ptr`.

    The token n gets from the token n + shift, if this one is of the same row, and so do the weights.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < n)[:, None] & is_channel[None, :]
    given = token.to(tl.int64)[:, None] * GIVEN + channel[None, :]
    place = token.to(tl.int64)[:, None] * STRIDE + first + dim[None, :]
    if sums_ptr is not None:
        x = tl.load(given_ptr + given, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros(inside.shape, tl.float32)
    for shift in tl.static_range(WIDTH):
        age = tl.load(ages_ptr + token + shift, mask=token + shift < n, other=-1)
        seen = (age >= shift)[:, None] & inside
        grad = tl.load(grad_ptr + place + shift * STRIDE, mask=seen, other=0.0).to(tl.float32)
        weight = conv_ptr + channel * WIDTH + WIDTH - 1 - shift
        total += grad * tl.load(weight, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if sums_ptr is not None:
            sums = sums_ptr + tl.program_id(0).to(tl.int64) * size + channel * WIDTH + WIDTH - 1 - shift
            tl.store(sums, tl.sum(grad * x, axis=0), mask=is_channel)
    tl.store(out_ptr + given, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["n"])
def _before_convolution_kernel(
    given_ptr,
    conv_ptr,
    log_decay_ptr,
    bias_ptr,
    ages_ptr,
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
    TOKENS: tl.constexpr,
):
    """And through the gates. size: of what a block of tokens leaves of the weights' gradients."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    GIVEN: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    part = tl.program_id(1)
    if part < 2 * KEY_HEADS:
        key = tl.arange(0, KEY_BLOCK)
        if part < KEY_HEADS:
            _before_convolution(
                given_ptr, conv_ptr, ages_ptr, grad_q_ptr, out_ptr, conv_sums_ptr, part * KEY, key, n, size,
                part * KEY + key, key < KEY, GIVEN, KEY_HEADS * KEY, WIDTH, TOKENS,
            )  # fmt: skip
        else:
            _before_convolution(
                given_ptr, conv_ptr, ages_ptr, grad_k_ptr, out_ptr, conv_sums_ptr, (part - KEY_HEADS) * KEY, key, n,
                size, part * KEY + key, key < KEY, GIVEN, KEY_HEADS * KEY, WIDTH, TOKENS,
            )  # fmt: skip
    elif part < 2 * KEY_HEADS + HEADS:
        first = (part - 2 * KEY_HEADS) * VALUE
        value = tl.arange(0, VALUE_BLOCK)
        _before_convolution(
            given_ptr, conv_ptr, ages_ptr, grad_v_ptr, out_ptr, conv_sums_ptr, first, value, n, size,
            2 * KEY_HEADS * KEY + first + value, value < VALUE, GIVEN, HEADS * VALUE, WIDTH, TOKENS,
        )  # fmt: skip
    else:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        head = tl.arange(0, HEAD_BLOCK)
        inside = (token < n)[:, None] & (head < HEADS)[None, :]
        given = token.to(tl.int64)[:, None] * GIVEN + CHANNELS + HEADS * VALUE + head[None, :]
        place = token.to(tl.int64)[:, None] * HEADS + head[None, :]
        b = tl.load(given_ptr + given, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(given_ptr + given + HEADS, mask=inside, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)[None, :]
        rate = tl.exp(tl.load(log_decay_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32))[None, :]
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
