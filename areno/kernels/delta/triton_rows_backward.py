# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""The backward pass of `triton_rows.py` as two Triton kernels: through silu and head norms, then the convolution.

The first kernel overwrites the gradients with respect to q, k and v by those with respect to the convolution's output.
In the second kernel, each program sums the gradients of the weights over its block of tokens, and the partial sums of
the L blocks are added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.parts import DeltaWeights, RowChunks
from areno.kernels.delta.triton_rows import LENGTH_EPS, causal_conv, row_sizes, softplus
from areno.kernels.elementwise.triton_norm import add_sums
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

HEAD_TOKENS, HEAD_WARPS = 16, 2  # of one program of `_heads_backward_kernel`; the fastest of four choices on an H200
CONV_TOKENS, CONV_WARPS = 32, 4  # of one program of `_conv_backward_kernel`


def conv_and_gates_backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    proj_NP: Tensor,
    weights: DeltaWeights,
    chunks: RowChunks,
    grad_proj_NP: Tensor,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Write all columns of `grad_proj_NP` but those of z. If `of_weights`, return the weights' gradients.

    `grads` are the gradients of q, k, v, decay and beta. The first three are overwritten. Inputs before a row count as
    zeros. The weights are those of the convolution, A_log and dt_bias.
    """
    n, sizes, n_heads = len(proj_NP), row_sizes(weights), weights.n_heads
    grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH = grads
    n_blocks, n_parts = triton.cdiv(n, CONV_TOKENS), 2 * weights.n_key_heads + n_heads
    n_conv = weights.conv_XW.numel()
    sums_LD = of_conv_LD = of_gates_LD = None
    if of_weights:
        sums_LD = torch.empty(n_blocks, n_conv + 2 * n_heads, dtype=torch.float32, device=proj_NP.device)
        of_conv_LD, of_gates_LD = sums_LD, sums_LD[:, n_conv:]
    if n:
        inputs, grads_of_heads = (proj_NP, weights.conv_XW), (grad_q_NGK, grad_k_NGK, grad_v_NHV)
        how = {"TOKENS": HEAD_TOKENS, "num_warps": HEAD_WARPS}
        _heads_backward_kernel[(triton.cdiv(n, HEAD_TOKENS), n_parts)](
            *inputs, chunks.positions_N, *grads_of_heads, n, weights.key_dim**-0.5, S=sizes, **how
        )
        gates = (weights.A_log_H, weights.dt_bias_H, chunks.positions_N)
        grads_of_gates, results = (grad_decay_NH, grad_beta_NH), (grad_proj_NP, of_conv_LD, of_gates_LD)
        how = {"TOKENS": CONV_TOKENS, "num_warps": CONV_WARPS}
        _conv_backward_kernel[(n_blocks, n_parts + 1)](
            *inputs, *gates, *grads_of_heads, *grads_of_gates, *results, n, n_conv + 2 * n_heads, S=sizes, **how
        )
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
def _norm_backward(grad_ptr, place, inside, x, scale):
    """Overwrite the gradient of a normalised head by the gradient of x, the convolution's output for this head."""
    grad = load_fp32(grad_ptr + place, inside) * scale
    key = x * tl.sigmoid(x)
    per_length = tl.rsqrt(tl.sum(key * key, axis=1) + LENGTH_EPS)[:, None]
    key *= per_length
    along = tl.sum(grad * key, axis=1)[:, None]
    grad = per_length * (grad - key * along) * _silu_gradient(x)
    tl.store(grad_ptr + place, grad, mask=inside)


@kernel(do_not_specialize=["n"])
def _heads_backward_kernel(
    proj_ptr,
    conv_ptr,
    positions_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
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
        x = causal_conv(proj_ptr, conv_ptr, None, None, token, position, is_token, channel, real, S)
        inside = is_token[:, None] & (key < S.KEY)[None, :]
        place = token.to(tl.int64)[:, None] * (S.KEY_HEADS * S.KEY) + key[None, :]
        if part < S.KEY_HEADS:
            _norm_backward(grad_q_ptr, place + part * S.KEY, inside, x, scale)
        else:
            _norm_backward(grad_k_ptr, place + (part - S.KEY_HEADS) * S.KEY, inside, x, 1.0)
    else:
        first = (part - 2 * S.KEY_HEADS) * S.VALUE
        value = tl.arange(0, S.VALUE_BLOCK)
        v_channel, is_v = 2 * S.KEY_HEADS * S.KEY + first + value, value < S.VALUE
        v = causal_conv(proj_ptr, conv_ptr, None, None, token, position, is_token, v_channel, is_v, S)
        is_value = is_token[:, None] & (value < S.VALUE)[None, :]
        v_place = grad_v_ptr + token.to(tl.int64)[:, None] * (S.HEADS * S.VALUE) + first + value[None, :]
        grad = load_fp32(v_place, is_value) * _silu_gradient(v)
        tl.store(v_place, grad, mask=is_value)


@triton.jit
def _conv_backward(
    shared, grad_ptr, first, dim, channel, is_channel, STRIDE: tl.constexpr, S: tl.constexpr, TOKENS: tl.constexpr
):
    """Compute the gradients of the convolution's inputs and weights for the channels of one head.

    The gradient of the input of token t has a term from each token t + shift in the same row, for shifts below WIDTH.
    """
    proj_ptr, conv_ptr, positions_ptr, out_ptr, sums_ptr, n, size = shared
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < n)[:, None] & is_channel[None, :]
    given = token.to(tl.int64)[:, None] * S.PROJ + channel[None, :]
    place = token.to(tl.int64)[:, None] * STRIDE + first + dim[None, :]
    if sums_ptr is not None:
        x = load_fp32(proj_ptr + given, inside)
    total = tl.zeros(inside.shape, tl.float32)
    for shift in tl.static_range(S.WIDTH):
        position = tl.load(positions_ptr + token + shift, mask=token + shift < n, other=-1)
        seen = (position >= shift)[:, None] & inside
        grad = load_fp32(grad_ptr + place + shift * STRIDE, seen)
        weight = conv_ptr + channel * S.WIDTH + S.WIDTH - 1 - shift
        total += grad * load_fp32(weight, is_channel)[None, :]
        if sums_ptr is not None:
            sums = sums_ptr + program_id_64(0) * size + channel * S.WIDTH + S.WIDTH - 1 - shift
            tl.store(sums, tl.sum(grad * x, axis=0), mask=is_channel)
    tl.store(out_ptr + given, total, mask=inside)


@kernel(do_not_specialize=["n"])
def _conv_backward_kernel(
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
    S: tl.constexpr,
    TOKENS: tl.constexpr,
):
    shared = proj_ptr, conv_ptr, positions_ptr, out_ptr, conv_sums_ptr, n, size
    part = tl.program_id(1)
    if part < 2 * S.KEY_HEADS:
        key = tl.arange(0, S.KEY_BLOCK)
        STRIDE: tl.constexpr = S.KEY_HEADS * S.KEY
        if part < S.KEY_HEADS:
            first = part * S.KEY
            _conv_backward(shared, grad_q_ptr, first, key, part * S.KEY + key, key < S.KEY, STRIDE, S, TOKENS)
        else:
            first = (part - S.KEY_HEADS) * S.KEY
            _conv_backward(shared, grad_k_ptr, first, key, part * S.KEY + key, key < S.KEY, STRIDE, S, TOKENS)
    elif part < 2 * S.KEY_HEADS + S.HEADS:
        first = (part - 2 * S.KEY_HEADS) * S.VALUE
        value = tl.arange(0, S.VALUE_BLOCK)
        channel = 2 * S.KEY_HEADS * S.KEY + first + value
        _conv_backward(shared, grad_v_ptr, first, value, channel, value < S.VALUE, S.HEADS * S.VALUE, S, TOKENS)
    else:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        head = tl.arange(0, S.HEAD_BLOCK)
        inside = (token < n)[:, None] & (head < S.HEADS)[None, :]
        given = token.to(tl.int64)[:, None] * S.PROJ + S.CHANNELS + S.HEADS * S.VALUE + head[None, :]
        place = token.to(tl.int64)[:, None] * S.HEADS + head[None, :]
        b = load_fp32(proj_ptr + given, inside)
        a = load_fp32(proj_ptr + given + S.HEADS, inside)
        a += load_fp32(bias_ptr + head, head < S.HEADS)[None, :]
        rate = tl.exp(load_fp32(A_log_ptr + head, head < S.HEADS))[None, :]
        grad_decay = load_masked(grad_decay_ptr + place, inside) * -rate
        beta = tl.sigmoid(b)
        grad_b = load_masked(grad_beta_ptr + place, inside) * beta * (1.0 - beta)
        grad_a = grad_decay * tl.sigmoid(a)
        tl.store(out_ptr + given, grad_b, mask=inside)
        tl.store(out_ptr + given + S.HEADS, grad_a, mask=inside)
        if gate_sums_ptr is not None:
            sums = gate_sums_ptr + program_id_64(0) * size + head
            tl.store(sums, tl.sum(grad_decay * softplus(a), axis=0), mask=head < S.HEADS)
            tl.store(sums + S.HEADS, tl.sum(grad_a, axis=0), mask=head < S.HEADS)
