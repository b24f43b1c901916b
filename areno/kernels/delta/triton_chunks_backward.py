# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""The gradients of the gated delta rule of packed sequences (rows) in chunks, as Triton kernels.

Names and formulas are those of `triton_chunks.py`. Let d mark gradients, S' the state after a chunk, P_ij = exp(g_i -
g_j), and "lower" include the diagonal:

    dv_new = (lower part of P_ij q_i k_j)^T dout + (exp(g_last - g) k) dS'
    dS = exp(g_last) dS' + (exp(g) q)^T dout - w^T dv_new;  dw = -dv_new S^T;  du = dv_new
    dq = exp(g) dout S^T + (lower part of P_ij dout_i v_new_j) k
    dk = exp(g_last - g) v_new dS'^T + (lower part of P_ij dout_i v_new_j)^T q + the gradients through A and w
    dsides = inverse^T (dw, du);  dA = -strictly lower part of (dsides (w, u)^T)

The last line needs no gradient of the inverse, as inverse^T dinverse inverse^T is a product of known matrices. Every
factor exp(g_i) contributes to dg_i the dot product of the vector that it scales and the gradient of this vector; for q
this is q_i dq_i.

There are five kernels. The first computes the part of dv_new that comes from the same chunk. The second computes the
gradients of the states, along each row. The third computes the gradients of q and w, and of k without the terms through
A and w. The fourth computes the gradients that pass through w and u. The fifth computes the gradient of k through A. A
program that sums gradients of q or k handles all value heads of a key head, so every sum has a fixed order. `dot` must
not take the transpose of a product's result, so such a result is written and read again, or computed a second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.parts import RowChunks
from areno.kernels.delta.triton_chunks import (
    SavedTensors,
    chunk_tokens,
    decay_between,
    decay_to_end,
    kernel_sizes,
    load_columns,
    load_rows,
    state_columns,
    store_rows,
)
from areno.kernels.jit import kernel, load_masked
from areno.kernels.matmul.triton import dot, dot_precision

PRECISION = "bf16"  # of products if q, k and v are bfloat16; "bf16x3" works, too; see triton_chunks.py
_ALL = 1 << 20  # more than any number of columns, so that a tile has all of them
_LOCAL, _STATES, _CHUNKS, _SYSTEMS, _KEYS = (
    {"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 1), (4, 2), (4, 1), (4, 1), (4, 1))
)  # fixed, so that the order of sums never changes


def chunks_backward(
    grad_out_NHV: Tensor,
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    chunks: RowChunks,
    saved: SavedTensors,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients with respect to q, k, v, decay and beta, fp32.

    Temporary tensors take (K + V + K V / C) H + C G elements of 4 bytes for each token. With products in "bf16", all
    but the C G elements have 2 bytes, which makes 36 KiB with G = 16, H = 32, K = V = 128, C = 64.
    """
    n_tokens, n_heads, _ = v_NHV.shape
    n_key_heads, key_dim = q_NGK.shape[1:]
    n_rows, (n_chunks, size) = len(chunks.order_R), chunks.tokens_TC.shape
    precision = dot_precision(v_NHV, PRECISION)
    kept = torch.bfloat16 if precision == "bf16" else torch.float32

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v_NHV.device)

    grad_q_NGK, grad_k_NGK = empty(*q_NGK.shape), empty(*k_NGK.shape)
    grad_v_NHV, grad_decay_NH, grad_beta_NH = empty(*v_NHV.shape), empty(*decay_NH.shape), empty(*beta_NH.shape)
    if not n_tokens:
        return grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH
    sizes = kernel_sizes(q_NGK, v_NHV, chunks, precision)
    q_NGK, k_NGK, v_NHV, grad_out_NHV = (each.contiguous() for each in (q_NGK, k_NGK, v_NHV, grad_out_NHV))
    beta_NH, places, g = beta_NH.contiguous(), (chunks.tokens_TC, chunks.sizes_T), (saved.g_THC, saved.g_low_THC)
    inputs = (grad_out_NHV, q_NGK, k_NGK, *g)
    grad_v_new_NHV = empty(*v_NHV.shape, dtype=kept)
    _grad_v_local_kernel[(n_heads, n_chunks)](*inputs, *places, grad_v_new_NHV, S=sizes, **_LOCAL)
    grad_states_THKV = empty(*saved.states_THKV.shape, dtype=kept)
    columns = state_columns(v_NHV, n_rows)
    rows = (chunks.borders, chunks.order_R, chunks.first_chunks_J)
    how = kernel_sizes(q_NGK, v_NHV, chunks, precision, _ALL, columns)
    _grad_states_kernel[(triton.cdiv(v_NHV.shape[2], columns), n_heads, n_rows)](
        *inputs, saved.w_NHK, grad_v_new_NHV, grad_states_THKV, *rows, S=how, **_STATES
    )
    grad_w_NHK, grad_g_THC = empty(n_tokens, n_heads, key_dim, dtype=kept), empty(n_chunks, n_heads, size)
    states = (saved.v_new_NHV, saved.states_THKV, grad_states_THKV, grad_v_new_NHV)
    results = (grad_w_NHK, grad_g_THC, grad_q_NGK, grad_k_NGK)
    _grad_qkwg_kernel[(n_key_heads, n_chunks)](*inputs, *states, *places, *results, S=sizes, **_CHUNKS)
    del grad_states_THKV, states
    grad_system_NGC = empty(n_tokens, n_key_heads, size)
    factors = (saved.inverse_NHC, saved.w_NHK, saved.u_NHV, grad_w_NHK, grad_v_new_NHV)
    results = (grad_g_THC, grad_system_NGC, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH)
    _wy_backward_kernel[(n_key_heads, n_chunks)](
        k_NGK, v_NHV, beta_NH, *g, *factors, *places, *results, S=sizes, **_SYSTEMS
    )
    _grad_k_kernel[(n_key_heads, n_chunks)](k_NGK, grad_system_NGC, *places, grad_k_NGK, S=sizes, **_KEYS)
    return grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH


@kernel
def _grad_v_local_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    g_low_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_v_new_ptr,
    S: tl.constexpr,
):
    head = tl.program_id(0)
    chunk, first, inside = chunk_tokens(tokens_ptr, sizes_ptr, S.SIZE)
    each, line, key_line = tl.arange(0, S.SIZE), first * S.HEADS + head, first * S.KEY_HEADS + head // S.SHARED
    at = (chunk * S.HEADS + head) * S.SIZE
    transposed = tl.zeros((S.SIZE, S.SIZE), tl.float32)
    for start in range(0, S.KEY, S.KEY_PART):
        k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        q = load_columns(q_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        transposed += dot(k, q, S.PRECISION)
    g, g_low = tl.load(g_ptr + at + each), tl.load(g_low_ptr + at + each)
    transposed *= decay_between(g, g_low, each[:, None] <= each[None, :], True)
    for start in range(0, S.VALUE, S.VALUE_PART):
        grad_v_new = dot(
            transposed, load_rows(grad_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start), S.PRECISION
        )
        store_rows(grad_v_new_ptr, grad_v_new, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)


@kernel
def _grad_states_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    g_low_ptr,
    w_ptr,
    grad_v_new_ptr,
    grad_states_ptr,
    borders_ptr,
    order_ptr,
    first_chunks_ptr,
    S: tl.constexpr,
):
    start, head, place = tl.program_id(0) * S.VALUE_PART, tl.program_id(1), tl.program_id(2)
    row = tl.load(order_ptr + place)
    begin, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    each, has_key = tl.arange(0, S.SIZE), tl.arange(0, S.KEY_PART) < S.KEY
    n_steps = tl.cdiv(end - begin, S.SIZE).to(tl.int32)
    grad_state = tl.zeros((S.KEY_PART, S.VALUE_PART), tl.float32)
    for back in range(n_steps):
        step = n_steps - 1 - back
        chunk = tl.load(first_chunks_ptr + step) + place
        first = begin + step * S.SIZE
        inside, line, key_line = first + each < end, first * S.HEADS + head, first * S.KEY_HEADS + head // S.SHARED
        at = (chunk * S.HEADS + head) * S.SIZE
        key_row = (chunk * S.HEADS + head) * S.KEY
        store_rows(grad_states_ptr, grad_state, key_row, has_key, 1, S.VALUE, S.VALUE_PART, start)
        left, kept = decay_to_end(g_ptr, g_low_ptr, at, S.SIZE)
        k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART)
        grad_v_new = load_rows(grad_v_new_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start).to(tl.float32)
        grad_v_new += dot(k, grad_state, S.PRECISION) * left[:, None]
        store_rows(grad_v_new_ptr, grad_v_new, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
        q = load_columns(q_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART)
        grad = load_rows(grad_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start).to(tl.float32)
        grad *= tl.exp(tl.load(g_ptr + at + each))[:, None]
        w = load_columns(w_ptr, line, inside, S.HEADS, S.KEY, S.KEY_PART)
        grad_state = grad_state * kept + dot(q, grad, S.PRECISION) - dot(w, grad_v_new, S.PRECISION)


@kernel
def _grad_qkwg_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    g_low_ptr,
    v_new_ptr,
    states_ptr,
    grad_states_ptr,
    grad_v_new_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_w_ptr,
    grad_g_ptr,
    grad_q_ptr,
    grad_k_ptr,
    S: tl.constexpr,
):
    key_head = tl.program_id(0)
    chunk, first, inside = chunk_tokens(tokens_ptr, sizes_ptr, S.SIZE)
    each, key_line = tl.arange(0, S.SIZE), first * S.KEY_HEADS + key_head
    for head in range(key_head * S.SHARED, (key_head + 1) * S.SHARED):
        line, at, key_row = first * S.HEADS + head, (chunk * S.HEADS + head) * S.SIZE, (chunk * S.HEADS + head) * S.KEY
        scores, transposed = tl.zeros((S.SIZE, S.SIZE), tl.float32), tl.zeros((S.SIZE, S.SIZE), tl.float32)
        for start in range(0, S.VALUE, S.VALUE_PART):
            grad = load_rows(grad_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
            scores += dot(
                grad, load_columns(v_new_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start), S.PRECISION
            )
            v_new = load_rows(v_new_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
            transposed += dot(
                v_new, load_columns(grad_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start), S.PRECISION
            )
        g, g_low = tl.load(g_ptr + at + each), tl.load(g_low_ptr + at + each)
        scores *= decay_between(g, g_low, each[:, None] >= each[None, :], False)
        transposed *= decay_between(g, g_low, each[:, None] <= each[None, :], True)
        left, kept = decay_to_end(g_ptr, g_low_ptr, at, S.SIZE)
        grad_g, to_end = tl.zeros((S.SIZE,), tl.float32), tl.zeros((S.SIZE,), tl.float32)
        both = tl.zeros((S.VALUE_PART,), tl.float32)
        for key in range(0, S.KEY, S.KEY_PART):
            has_key = key + tl.arange(0, S.KEY_PART) < S.KEY
            part_q = tl.zeros((S.SIZE, S.KEY_PART), tl.float32)
            part_k = tl.zeros((S.SIZE, S.KEY_PART), tl.float32)
            grad_w = tl.zeros((S.SIZE, S.KEY_PART), tl.float32)
            for start in range(0, S.VALUE, S.VALUE_PART):
                before = load_columns(states_ptr, key_row + key, has_key, 1, S.VALUE, S.VALUE_PART, start)
                after = load_columns(grad_states_ptr, key_row + key, has_key, 1, S.VALUE, S.VALUE_PART, start)
                both += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
                v_new = load_rows(v_new_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
                part_k += dot(v_new, after, S.PRECISION)
                grad = load_rows(grad_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
                part_q += dot(grad, before, S.PRECISION)
                grad = load_rows(grad_v_new_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
                grad_w -= dot(grad, before, S.PRECISION)
            store_rows(grad_w_ptr, grad_w, line, inside, S.HEADS, S.KEY, S.KEY_PART, key)
            q = load_rows(q_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, key)
            k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, key)
            part_k *= left[:, None]
            to_end += tl.sum(part_k * k.to(tl.float32), 1)
            part_k += dot(transposed, q, S.PRECISION)
            part_q = part_q * tl.exp(g)[:, None] + dot(scores, k, S.PRECISION)
            grad_g += tl.sum(part_q * q.to(tl.float32) - part_k * k.to(tl.float32), 1)
            others = inside & (each * 0 + head > key_head * S.SHARED)  # to add the sum over the previous heads
            part_q += load_rows(grad_q_ptr, key_line, others, S.KEY_HEADS, S.KEY, S.KEY_PART, key)
            store_rows(grad_q_ptr, part_q, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, key)
            part_k += load_rows(grad_k_ptr, key_line, others, S.KEY_HEADS, S.KEY, S.KEY_PART, key)
            store_rows(grad_k_ptr, part_k, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, key)
        grad_g += tl.where(each == S.SIZE - 1, tl.sum(to_end, 0) + kept * tl.sum(both, 0), 0.0)
        tl.store(grad_g_ptr + at + each, grad_g)


@kernel
def _wy_backward_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    g_ptr,
    g_low_ptr,
    inverse_ptr,
    w_ptr,
    u_ptr,
    grad_w_ptr,
    grad_v_new_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_g_ptr,
    grad_system_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_decay_ptr,
    grad_beta_ptr,
    S: tl.constexpr,
):
    key_head = tl.program_id(0)
    chunk, first, inside = chunk_tokens(tokens_ptr, sizes_ptr, S.SIZE)
    each, key_line = tl.arange(0, S.SIZE), first * S.KEY_HEADS + key_head
    keys, total = tl.zeros((S.SIZE, S.SIZE), tl.float32), tl.zeros((S.SIZE, S.SIZE), tl.float32)
    for start in range(0, S.KEY, S.KEY_PART):
        k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        keys += dot(k, tl.trans(k), S.PRECISION)
    for head in range(key_head * S.SHARED, (key_head + 1) * S.SHARED):
        line, at = first * S.HEADS + head, (chunk * S.HEADS + head) * S.SIZE
        place = line + each * S.HEADS
        g, g_low = tl.load(g_ptr + at + each), tl.load(g_low_ptr + at + each)
        beta = load_masked(beta_ptr + place, inside)
        transposed = load_columns(inverse_ptr, line, inside, S.HEADS, S.SIZE, S.SIZE)
        system = tl.zeros((S.SIZE, S.SIZE), tl.float32)
        grad_beta, along_k = tl.zeros((S.SIZE,), tl.float32), tl.zeros((S.SIZE,), tl.float32)
        for start in range(0, S.VALUE, S.VALUE_PART):
            grad_v_new = load_rows(grad_v_new_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
            side = dot(transposed, grad_v_new, S.PRECISION)
            u = load_columns(u_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
            system += dot(side, u, S.PRECISION)
            v = load_rows(v_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
            grad_beta += tl.sum(side * v.to(tl.float32), 1)
            store_rows(grad_v_ptr, side * beta[:, None], line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
        for start in range(0, S.KEY, S.KEY_PART):
            grad_w = load_rows(grad_w_ptr, line, inside, S.HEADS, S.KEY, S.KEY_PART, start)
            side = dot(transposed, grad_w, S.PRECISION)
            system += dot(side, load_columns(w_ptr, line, inside, S.HEADS, S.KEY, S.KEY_PART, start), S.PRECISION)
            side *= tl.exp(g)[:, None]
            k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
            along_k += tl.sum(side * k.to(tl.float32), 1)
            side = side * beta[:, None] + load_rows(grad_k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
            store_rows(grad_k_ptr, side, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        system *= -decay_between(g, g_low, each[:, None] > each[None, :], False)
        along_k += tl.sum(system * keys, 1)
        tl.store(grad_beta_ptr + place, grad_beta + along_k, inside)
        system *= beta[:, None]
        total += system
        grad_g = tl.load(grad_g_ptr + at + each) + beta * along_k - tl.sum(system * keys, 0)
        # A token's decay is a summand of its own g and of g of all later tokens.
        onward = tl.where(each[:, None] >= each[None, :], grad_g[:, None], 0.0)
        tl.store(grad_decay_ptr + place, tl.sum(onward, 0), inside)
    store_rows(grad_system_ptr, total, key_line, inside, S.KEY_HEADS, S.SIZE, S.SIZE)


@kernel
def _grad_k_kernel(
    k_ptr,
    grad_system_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_k_ptr,
    S: tl.constexpr,
):
    key_head = tl.program_id(0)
    _, first, inside = chunk_tokens(tokens_ptr, sizes_ptr, S.SIZE)
    key_line = first * S.KEY_HEADS + key_head
    system = load_rows(grad_system_ptr, key_line, inside, S.KEY_HEADS, S.SIZE, S.SIZE)
    system += load_columns(grad_system_ptr, key_line, inside, S.KEY_HEADS, S.SIZE, S.SIZE)
    for start in range(0, S.KEY, S.KEY_PART):
        k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        grad = dot(system, k, S.PRECISION)
        grad += load_rows(grad_k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        store_rows(grad_k_ptr, grad, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
