# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Triton kernels for the steps before the delta rule in packed sequences (rows): convolution, q, k, v and gates.

A program computes some tokens of one head of q, k or v, or the gates of some tokens. It reads a token's input once for
each tap of the convolution, mostly from the L1 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.parts import DeltaWeights, RowChunks
from areno.kernels.jit import as_constants, kernel, load_fp32, load_masked, program_id_64

LENGTH_EPS = tl.constexpr(1e-6)  # added to the squared lengths of q and k, as in `reference.py`


class RowSizes(NamedTuple):
    """The constants of a kernel, which has them as one argument."""

    KEY_HEADS: int
    HEADS: int
    KEY: int
    VALUE: int
    WIDTH: int
    CHANNELS: int  # of the convolution: q, k and v
    PROJ: int  # columns of the projection
    KEY_BLOCK: int
    VALUE_BLOCK: int
    HEAD_BLOCK: int


def row_sizes(weights: DeltaWeights) -> RowSizes:
    n_key_heads, n_heads, key, value = weights.n_key_heads, weights.n_heads, weights.key_dim, weights.value_dim
    n_channels, width = weights.conv_XW.shape
    n_columns = n_channels + n_heads * value + 2 * n_heads
    blocks = map(triton.next_power_of_2, (key, value, n_heads))
    return as_constants(RowSizes(n_key_heads, n_heads, key, value, width, n_channels, n_columns, *blocks))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), and x itself for x above 20, as torch does."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def causal_conv(
    proj_ptr,
    conv_ptr,
    initial_ptr,
    rows_ptr,
    token,
    position,
    is_token,
    channel,
    real,
    S: tl.constexpr,
):
    """Return the causal convolution for some channels of some tokens, in fp32.

    The token's own input is added first, then the earlier inputs from the oldest on.
    """
    inside = is_token[:, None] & real[None, :]
    place = token.to(tl.int64)[:, None] * S.PROJ + channel[None, :]
    weight = load_fp32(conv_ptr + channel * S.WIDTH + S.WIDTH - 1, real)
    total = load_fp32(proj_ptr + place, inside) * weight[None, :]
    for earlier in tl.static_range(S.WIDTH - 1):
        shift = S.WIDTH - 1 - earlier
        in_row = (position >= shift)[:, None]
        x = load_fp32(proj_ptr + place - shift * S.PROJ, inside & in_row)
        if initial_ptr is not None:
            row = load_masked(rows_ptr + token, is_token)
            kept = (row[:, None] * S.CHANNELS + channel[None, :]) * (S.WIDTH - 1) + earlier + position[:, None]
            x += load_fp32(initial_ptr + kept, inside & (position < shift)[:, None])
        weight = load_fp32(conv_ptr + channel * S.WIDTH + earlier, real)
        total += x * weight[None, :]
    return total


TOKENS, WARPS = 32, 4  # of one program; the fastest of five choices on an H200
_CHANNELS = 256  # channels that one program of `conv_states` copies


def conv_and_gates(
    proj_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, initial_RXw: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, sizes = len(proj_NP), row_sizes(weights)
    q_NGK = proj_NP.new_empty(n, weights.n_key_heads, weights.key_dim)
    k_NGK, v_NHV = torch.empty_like(q_NGK), proj_NP.new_empty(n, weights.n_heads, weights.value_dim)
    decay_NH = torch.empty(n, weights.n_heads, dtype=torch.float32, device=proj_NP.device)
    beta_NH = torch.empty_like(decay_NH)
    if n:
        inputs = (proj_NP, weights.conv_XW, weights.A_log_H, weights.dt_bias_H)
        states = (None, None) if initial_RXw is None else (initial_RXw.contiguous(), chunks.rows_N)
        results = (q_NGK, k_NGK, v_NHV, decay_NH, beta_NH)
        grid = (triton.cdiv(n, TOKENS), 2 * weights.n_key_heads + weights.n_heads + 1)
        _conv_and_gates_kernel[grid](
            *inputs,
            *states,
            chunks.positions_N,
            *results,
            n,
            weights.key_dim**-0.5,
            S=sizes,
            TOKENS=TOKENS,
            num_warps=WARPS,
        )
    return q_NGK, k_NGK, v_NHV, decay_NH, beta_NH


def conv_states(proj_NP: Tensor, initial_RXw: Tensor | None, weights: DeltaWeights, chunks: RowChunks) -> Tensor:
    n_rows, (n_channels, width) = len(chunks.lengths_R), weights.conv_XW.shape
    kept_RXw = proj_NP.new_empty(n_rows, n_channels, width - 1)
    if n_rows and width > 1:
        initial_RXw = None if initial_RXw is None else initial_RXw.contiguous()
        tensors, how = (proj_NP, initial_RXw, chunks.borders, kept_RXw), {"BEFORE": width - 1, "BLOCK": _CHANNELS}
        grid = (n_rows, triton.cdiv(n_channels, _CHANNELS))
        _conv_states_kernel[grid](*tensors, proj_NP.shape[1], n_channels, **how)
    return kept_RXw


@kernel(do_not_specialize=["n"])
def _conv_and_gates_kernel(
    proj_ptr,
    conv_ptr,
    A_log_ptr,
    bias_ptr,
    initial_ptr,
    rows_ptr,
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    n,
    scale,
    S: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < n
    position = load_masked(positions_ptr + token, is_token)
    part = tl.program_id(1)
    if part < 2 * S.KEY_HEADS:
        key = tl.arange(0, S.KEY_BLOCK)
        channel, real = part * S.KEY + key, key < S.KEY
        x = causal_conv(proj_ptr, conv_ptr, initial_ptr, rows_ptr, token, position, is_token, channel, real, S)
        x *= tl.sigmoid(x)
        x *= tl.rsqrt(tl.sum(x * x, axis=1) + LENGTH_EPS)[:, None]
        inside = is_token[:, None] & (key < S.KEY)[None, :]
        place = token.to(tl.int64)[:, None] * (S.KEY_HEADS * S.KEY) + key[None, :]
        if part < S.KEY_HEADS:
            tl.store(q_ptr + place + part * S.KEY, x * scale, mask=inside)
        else:
            tl.store(k_ptr + place + (part - S.KEY_HEADS) * S.KEY, x, mask=inside)
    elif part < 2 * S.KEY_HEADS + S.HEADS:
        first = (part - 2 * S.KEY_HEADS) * S.VALUE
        value = tl.arange(0, S.VALUE_BLOCK)
        v_channel, is_v = 2 * S.KEY_HEADS * S.KEY + first + value, value < S.VALUE
        v = causal_conv(proj_ptr, conv_ptr, initial_ptr, rows_ptr, token, position, is_token, v_channel, is_v, S)
        v *= tl.sigmoid(v)
        v_place = token.to(tl.int64)[:, None] * (S.HEADS * S.VALUE) + first + value[None, :]
        tl.store(v_ptr + v_place, v, mask=is_token[:, None] & (value < S.VALUE)[None, :])
    else:
        head = tl.arange(0, S.HEAD_BLOCK)
        is_head = is_token[:, None] & (head < S.HEADS)[None, :]
        given = proj_ptr + token.to(tl.int64)[:, None] * S.PROJ + S.CHANNELS + S.HEADS * S.VALUE + head[None, :]
        b = load_fp32(given, is_head)
        a = load_fp32(given + S.HEADS, is_head)
        a += load_fp32(bias_ptr + head, head < S.HEADS)[None, :]
        rate = tl.exp(load_fp32(A_log_ptr + head, head < S.HEADS))[None, :]
        gate_place = token.to(tl.int64)[:, None] * S.HEADS + head[None, :]
        tl.store(decay_ptr + gate_place, -rate * softplus(a), mask=is_head)
        tl.store(beta_ptr + gate_place, tl.sigmoid(b), mask=is_head)


@kernel
def _conv_states_kernel(
    proj_ptr, initial_ptr, borders_ptr, kept_ptr, proj_size, n_channels, BEFORE: tl.constexpr, BLOCK: tl.constexpr
):
    row = program_id_64(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < n_channels
    start, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    kept = (row * n_channels + channel) * BEFORE
    for place in tl.static_range(BEFORE):
        token = end - BEFORE + place + tl.zeros([BLOCK], tl.int64)
        x = load_masked(proj_ptr + token * proj_size + channel, inside & (token >= start))
        if initial_ptr is not None:
            earlier = kept + BEFORE + token - start
            x += load_masked(initial_ptr + earlier, inside & (token < start))
        tl.store(kept_ptr + kept + place, x, mask=inside)
