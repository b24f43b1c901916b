# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""What packed rows give to the rule: q, k, v and gates, in one kernel; and what they leave of their inputs.

A program has some tokens of one head of q, k or v, or the gates of these tokens. It reads a token's inputs once for
each place of the convolution, all but the first time from the processor's own cache. Letters as in the package.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.around.triton_parts import LENGTH_EPS, convolved, sizes_of, softplus
from areno.kernels.delta.parts import DeltaWeights
from areno.kernels.delta.row_chunks import RowChunks
from areno.kernels.jit import kernel

TOKENS, WARPS = 32, 4  # of a program: of five, the fastest on an H200
_CHANNELS = 256  # of a program of `last_inputs`


def mixed_rows(
    given_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, before_RXw: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q (N, G, K) and k, normalised, and v (N, H, V), in the dtype given; decay and beta (N, H) in float32.

    given_NP: contiguous. before_RXw: inputs before the rows, where these do not begin with zeros.
    """
    n, sizes = len(given_NP), sizes_of(weights)
    q_NGK = given_NP.new_empty(n, weights.n_key_heads, weights.key_dim)
    k_NGK, v_NHV = torch.empty_like(q_NGK), given_NP.new_empty(n, weights.n_heads, weights.value_dim)
    decay_NH = torch.empty(n, weights.n_heads, dtype=torch.float32, device=given_NP.device)
    beta_NH = torch.empty_like(decay_NH)
    if n:
        _mix_kernel[(triton.cdiv(n, TOKENS), 2 * weights.n_key_heads + weights.n_heads + 1)](
            given_NP, weights.conv_XW, weights.log_decay_H, weights.bias_H,
            None if before_RXw is None else before_RXw.contiguous(), None if before_RXw is None else chunks.rows_N,
            chunks.ages_N, q_NGK, k_NGK, v_NHV, decay_NH, beta_NH, n, weights.key_dim**-0.5,
            **sizes, TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return q_NGK, k_NGK, v_NHV, decay_NH, beta_NH


def last_inputs(given_NP: Tensor, before_RXw: Tensor | None, weights: DeltaWeights, chunks: RowChunks) -> Tensor:
    """The last w inputs of each row, (R, X, w), those before the rows included; zeros before these."""
    n_rows, (n_channels, width) = len(chunks.lengths_R), weights.conv_XW.shape
    kept_RXw = given_NP.new_empty(n_rows, n_channels, width - 1)
    if n_rows and width > 1:
        _last_inputs_kernel[(n_rows, triton.cdiv(n_channels, _CHANNELS))](
            given_NP, None if before_RXw is None else before_RXw.contiguous(), chunks.borders, kept_RXw,
            given_NP.shape[1], n_channels, BEFORE=width - 1, BLOCK=_CHANNELS,
        )  # fmt: skip
    return kept_RXw


@kernel(do_not_specialize=["n"])
def _mix_kernel(
    given_ptr,
    conv_ptr,
    log_decay_ptr,
    bias_ptr,
    before_ptr,
    rows_ptr,
    ages_ptr,
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
    GIVEN: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < n
    age = tl.load(ages_ptr + token, mask=is_token, other=0)
    part = tl.program_id(1)
    if part < 2 * KEY_HEADS:
        key = tl.arange(0, KEY_BLOCK)
        x = convolved(
            given_ptr, conv_ptr, before_ptr, rows_ptr, token, age, is_token, part * KEY + key, key < KEY,
            GIVEN, CHANNELS, WIDTH,
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
            given_ptr, conv_ptr, before_ptr, rows_ptr, token, age, is_token,
            2 * KEY_HEADS * KEY + first + value, value < VALUE, GIVEN, CHANNELS, WIDTH,
        )  # fmt: skip
        v *= tl.sigmoid(v)
        v_place = token.to(tl.int64)[:, None] * (HEADS * VALUE) + first + value[None, :]
        tl.store(v_ptr + v_place, v.to(v_ptr.dtype.element_ty), mask=is_token[:, None] & (value < VALUE)[None, :])
    else:
        head = tl.arange(0, HEAD_BLOCK)
        is_head = is_token[:, None] & (head < HEADS)[None, :]
        given = given_ptr + token.to(tl.int64)[:, None] * GIVEN + CHANNELS + HEADS * VALUE + head[None, :]
        b = tl.load(given, mask=is_head, other=0.0).to(tl.float32)
        a = tl.load(given + HEADS, mask=is_head, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)[None, :]
        rate = tl.exp(tl.load(log_decay_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32))[None, :]
        gate_place = token.to(tl.int64)[:, None] * HEADS + head[None, :]
        tl.store(decay_ptr + gate_place, -rate * softplus(a), mask=is_head)
        tl.store(beta_ptr + gate_place, tl.sigmoid(b), mask=is_head)


@kernel
def _last_inputs_kernel(
    given_ptr, before_ptr, borders_ptr, kept_ptr, n_given, n_channels, BEFORE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < n_channels
    start, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    kept = (row * n_channels + channel) * BEFORE
    for place in tl.static_range(BEFORE):
        token = end - BEFORE + place + tl.zeros([BLOCK], tl.int64)
        x = tl.load(given_ptr + token * n_given + channel, mask=inside & (token >= start), other=0.0)
        if before_ptr is not None:
            earlier = kept + BEFORE + token - start
            x += tl.load(before_ptr + earlier, mask=inside & (token < start), other=0.0)
        tl.store(kept_ptr + kept + place, x, mask=inside)
