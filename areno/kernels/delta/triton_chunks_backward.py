# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""The gradients of the gated delta rule of packed rows in chunks. Names and formulas as in triton_chunks.py.

With d for gradients, S' for the state behind a chunk, P_ij = exp(g_i - g_j), and "lower" with the diagonal:

    dnew = (lower part of P_ij q_i k_j)^T dout + (exp(g_last - g) k) dS'
    dS = exp(g_last) dS' + (exp(g) q)^T dout - held^T dnew;  dheld = -dnew S^T;  dvalues = dnew
    dq = exp(g) dout S^T + (lower part of P_ij dout_i new_j) k
    dk = exp(g_last - g) new dS'^T + (lower part of P_ij dout_i new_j)^T q + what is from A and `held`
    dsides = inverse^T (dheld, dvalues);  dA = -strictly lower part of (dsides (held, values)^T)

The last line needs no gradient of the inverse: inverse^T dinverse inverse^T is a product of what there is anyway.
g_i's gradient takes, from each factor exp(g_i), what is multiplied with it times its gradient: for q, q_i dq_i.

Five kernels: what `new` has within chunks; the states' gradients, along each row; what q and k have but from the
triangular systems; what is from these; and what the keys have from A. A program takes all heads of a key head where it
adds up for q and k, so all sums have a fixed order. No result of a product is an operand transposed (see `product`):
where it would be, it is written and read again, or computed a second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.parts import RowChunks
from areno.kernels.delta.triton_chunks import (
    Saved,
    chunk_tokens,
    decay_between,
    decay_to_end,
    kernel_sizes,
    load_columns,
    load_rows,
    product,
    products_of,
    state_columns,
    store_rows,
)
from areno.kernels.jit import kernel

PRODUCTS = "bf16"  # or "split"; see triton_chunks.py
_ALL = 1 << 20
_LOCAL, _STATES, _CHUNKS, _SYSTEMS, _KEYS = (
    {"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 1), (4, 2), (4, 1), (4, 1), (4, 1))
)  # of kernels; fixed, so that two runs add in one order


def chunks_backward(
    grad_out_NHV: Tensor,
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    chunks: RowChunks,
    saved: Saved,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients by q, k, v, decay and beta, all of them fp32. grad_out_NHV: bf16 or fp32.

    At work beside what was saved and the gradients: (K + V + K V / C) H + C G numbers a token of 4 bytes, with products
    in "bf16" of 2 but for C G; 36 KiB with G = 16, H = 32, K = V = 128, C = 64 in "bf16".
    """
    n_tokens, n_heads, _ = v_NHV.shape
    n_key_heads, key_dim = q_NGK.shape[1:]
    n_rows, (n_chunks, size) = len(chunks.order_R), chunks.tokens_TC.shape
    products = products_of(v_NHV, PRODUCTS)
    kept = torch.bfloat16 if products == "bf16" else torch.float32

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v_NHV.device)

    grad_q_NGK, grad_k_NGK = empty(*q_NGK.shape), empty(*k_NGK.shape)
    grad_v_NHV, grad_decay_NH, grad_beta_NH = empty(*v_NHV.shape), empty(*decay_NH.shape), empty(*beta_NH.shape)
    if not n_tokens:
        return grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH
    sizes = kernel_sizes(q_NGK, v_NHV, chunks, products)
    q_NGK, k_NGK, v_NHV, grad_out_NHV = (each.contiguous() for each in (q_NGK, k_NGK, v_NHV, grad_out_NHV))
    beta_NH, places, sums = beta_NH.contiguous(), (chunks.tokens_TC, chunks.sizes_T), (saved.sums_THC, saved.rest_THC)
    grad_new_NHV = empty(*v_NHV.shape, dtype=kept)
    _local_kernel[(n_heads, n_chunks)](grad_out_NHV, q_NGK, k_NGK, *sums, *places, grad_new_NHV, **sizes, **_LOCAL)
    grad_after_THKV = empty(*saved.before_THKV.shape, dtype=kept)
    columns = state_columns(v_NHV, n_rows)
    _grad_states_kernel[(triton.cdiv(v_NHV.shape[2], columns), n_heads, n_rows)](
        grad_out_NHV, q_NGK, k_NGK, *sums, saved.held_NHK, grad_new_NHV, grad_after_THKV, chunks.borders,
        chunks.order_R, chunks.firsts_J, **kernel_sizes(q_NGK, v_NHV, chunks, products, _ALL, columns), **_STATES,
    )  # fmt: skip
    grad_held_NHK, grad_sums_THC = empty(n_tokens, n_heads, key_dim, dtype=kept), empty(n_chunks, n_heads, size)
    _chunks_kernel[(n_key_heads, n_chunks)](
        grad_out_NHV, q_NGK, k_NGK, *sums, saved.new_NHV, saved.before_THKV, grad_after_THKV, grad_new_NHV, *places,
        grad_held_NHK, grad_sums_THC, grad_q_NGK, grad_k_NGK, **sizes, **_CHUNKS,
    )  # fmt: skip
    del grad_after_THKV
    grad_system_NGC = empty(n_tokens, n_key_heads, size)
    _systems_kernel[(n_key_heads, n_chunks)](
        k_NGK, v_NHV, beta_NH, *sums, saved.inverse_NHC, saved.held_NHK, saved.values_NHV, grad_held_NHK, grad_new_NHV,
        *places, grad_sums_THC, grad_system_NGC, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH,
        **sizes, **_SYSTEMS,
    )  # fmt: skip
    _keys_kernel[(n_key_heads, n_chunks)](k_NGK, grad_system_NGC, *places, grad_k_NGK, **sizes, **_KEYS)
    return grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH


@kernel
def _local_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    sums_ptr,
    rest_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_new_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_PART: tl.constexpr,
):
    """Of a chunk and a head: what `new` has from the results of the same chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, sizes_ptr, chunk, SIZE)
    each, line, key_line = tl.arange(0, SIZE), first * HEADS + head, first * (HEADS // SHARED) + head // SHARED
    at = (chunk * HEADS + head) * SIZE
    turned = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, KEY, KEY_PART):
        k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        q = load_columns(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        turned += product(k, q, PRODUCTS)
    sums, rest = tl.load(sums_ptr + at + each), tl.load(rest_ptr + at + each)
    turned *= decay_between(sums, rest, each[:, None] <= each[None, :], True)
    for start in range(0, VALUE, VALUE_PART):
        grad_new = product(turned, load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_PART, start), PRODUCTS)
        store_rows(grad_new_ptr, grad_new, line, inside, HEADS, VALUE, VALUE_PART, start)


@kernel
def _grad_states_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    sums_ptr,
    rest_ptr,
    held_ptr,
    grad_new_ptr,
    grad_after_ptr,
    borders_ptr,
    order_ptr,
    firsts_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_PART: tl.constexpr,
):
    """Some columns of the gradients of a head's states behind chunks, from a row's last chunk to its first; and what
    `new` has from them."""
    start, head, place = tl.program_id(0) * VALUE_PART, tl.program_id(1), tl.program_id(2)
    row = tl.load(order_ptr + place)
    begin, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    each, has_key = tl.arange(0, SIZE), tl.arange(0, KEY_PART) < KEY
    n_steps = tl.cdiv(end - begin, SIZE).to(tl.int32)
    grad_state = tl.zeros((KEY_PART, VALUE_PART), tl.float32)
    for back in range(n_steps):
        step = n_steps - 1 - back
        chunk = tl.load(firsts_ptr + step) + place
        first = begin + step * SIZE
        inside, line, key_line = first + each < end, first * HEADS + head, first * (HEADS // SHARED) + head // SHARED
        at = (chunk * HEADS + head) * SIZE
        key_row = (chunk * HEADS + head) * KEY
        store_rows(grad_after_ptr, grad_state, key_row, has_key, 1, VALUE, VALUE_PART, start)
        left, kept = decay_to_end(sums_ptr, rest_ptr, at, SIZE)
        k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART)
        grad_new = load_rows(grad_new_ptr, line, inside, HEADS, VALUE, VALUE_PART, start).to(tl.float32)
        grad_new += product(k, grad_state, PRODUCTS) * left[:, None]
        store_rows(grad_new_ptr, grad_new, line, inside, HEADS, VALUE, VALUE_PART, start)
        q = load_columns(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART)
        grad = load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_PART, start).to(tl.float32)
        grad *= tl.exp(tl.load(sums_ptr + at + each))[:, None]
        held = load_columns(held_ptr, line, inside, HEADS, KEY, KEY_PART)
        grad_state = grad_state * kept + product(q, grad, PRODUCTS) - product(held, grad_new, PRODUCTS)


@kernel
def _chunks_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    sums_ptr,
    rest_ptr,
    new_ptr,
    before_ptr,
    grad_after_ptr,
    grad_new_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_held_ptr,
    grad_sums_ptr,
    grad_q_ptr,
    grad_k_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_PART: tl.constexpr,
):
    """Of a chunk and the heads of a key head: the gradients of q and `held`, and of k and g what is not from A."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, sizes_ptr, chunk, SIZE)
    each, key_line = tl.arange(0, SIZE), first * (HEADS // SHARED) + key_head
    for head in range(key_head * SHARED, (key_head + 1) * SHARED):
        line, at, key_row = first * HEADS + head, (chunk * HEADS + head) * SIZE, (chunk * HEADS + head) * KEY
        seen, turned = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
        for start in range(0, VALUE, VALUE_PART):
            grad = load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
            seen += product(grad, load_columns(new_ptr, line, inside, HEADS, VALUE, VALUE_PART, start), PRODUCTS)
            new = load_rows(new_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
            turned += product(new, load_columns(grad_ptr, line, inside, HEADS, VALUE, VALUE_PART, start), PRODUCTS)
        sums, rest = tl.load(sums_ptr + at + each), tl.load(rest_ptr + at + each)
        seen *= decay_between(sums, rest, each[:, None] >= each[None, :], False)
        turned *= decay_between(sums, rest, each[:, None] <= each[None, :], True)
        left, kept = decay_to_end(sums_ptr, rest_ptr, at, SIZE)
        grad_sums, to_end = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
        both = tl.zeros((VALUE_PART,), tl.float32)
        for key in range(0, KEY, KEY_PART):
            has_key = key + tl.arange(0, KEY_PART) < KEY
            part_q = tl.zeros((SIZE, KEY_PART), tl.float32)
            part_k = tl.zeros((SIZE, KEY_PART), tl.float32)
            grad_held = tl.zeros((SIZE, KEY_PART), tl.float32)
            for start in range(0, VALUE, VALUE_PART):
                before = load_columns(before_ptr, key_row + key, has_key, 1, VALUE, VALUE_PART, start)
                after = load_columns(grad_after_ptr, key_row + key, has_key, 1, VALUE, VALUE_PART, start)
                both += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
                new = load_rows(new_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
                part_k += product(new, after, PRODUCTS)
                grad = load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
                part_q += product(grad, before, PRODUCTS)
                grad = load_rows(grad_new_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
                grad_held -= product(grad, before, PRODUCTS)
            store_rows(grad_held_ptr, grad_held, line, inside, HEADS, KEY, KEY_PART, key)
            q = load_rows(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, key)
            k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, key)
            part_k *= left[:, None]
            to_end += tl.sum(part_k * k.to(tl.float32), 1)
            part_k += product(turned, q, PRODUCTS)
            part_q = part_q * tl.exp(sums)[:, None] + product(seen, k, PRODUCTS)
            grad_sums += tl.sum(part_q * q.to(tl.float32) - part_k * k.to(tl.float32), 1)
            others = inside & (each * 0 + head > key_head * SHARED)  # the heads before this one left their gradients
            part_q += load_rows(grad_q_ptr, key_line, others, HEADS // SHARED, KEY, KEY_PART, key)
            store_rows(grad_q_ptr, part_q, key_line, inside, HEADS // SHARED, KEY, KEY_PART, key)
            part_k += load_rows(grad_k_ptr, key_line, others, HEADS // SHARED, KEY, KEY_PART, key)
            store_rows(grad_k_ptr, part_k, key_line, inside, HEADS // SHARED, KEY, KEY_PART, key)
        grad_sums += tl.where(each == SIZE - 1, tl.sum(to_end, 0) + kept * tl.sum(both, 0), 0.0)
        tl.store(grad_sums_ptr + at + each, grad_sums)


@kernel
def _systems_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    sums_ptr,
    rest_ptr,
    inverse_ptr,
    held_ptr,
    values_ptr,
    grad_held_ptr,
    grad_new_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_sums_ptr,
    grad_system_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_decay_ptr,
    grad_beta_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_PART: tl.constexpr,
):
    """Of a chunk and the heads of a key head, through `held` and `values`: the gradients of v, beta, g and so of decay;
    of k what is not from A; and that of k_i k_j in A."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, sizes_ptr, chunk, SIZE)
    each, key_line = tl.arange(0, SIZE), first * (HEADS // SHARED) + key_head
    keys, total = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, KEY, KEY_PART):
        k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        keys += product(k, tl.trans(k), PRODUCTS)
    for head in range(key_head * SHARED, (key_head + 1) * SHARED):
        line, at = first * HEADS + head, (chunk * HEADS + head) * SIZE
        place = line + each * HEADS
        sums, rest = tl.load(sums_ptr + at + each), tl.load(rest_ptr + at + each)
        beta = tl.load(beta_ptr + place, inside, 0.0)
        turned = load_columns(inverse_ptr, line, inside, HEADS, SIZE, SIZE)
        system = tl.zeros((SIZE, SIZE), tl.float32)
        grad_beta, along_k = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
        for start in range(0, VALUE, VALUE_PART):
            grad_new = load_rows(grad_new_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
            side = product(turned, grad_new, PRODUCTS)
            values = load_columns(values_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
            system += product(side, values, PRODUCTS)
            v = load_rows(v_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
            grad_beta += tl.sum(side * v.to(tl.float32), 1)
            store_rows(grad_v_ptr, side * beta[:, None], line, inside, HEADS, VALUE, VALUE_PART, start)
        for start in range(0, KEY, KEY_PART):
            grad_held = load_rows(grad_held_ptr, line, inside, HEADS, KEY, KEY_PART, start)
            side = product(turned, grad_held, PRODUCTS)
            system += product(side, load_columns(held_ptr, line, inside, HEADS, KEY, KEY_PART, start), PRODUCTS)
            side *= tl.exp(sums)[:, None]
            k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
            along_k += tl.sum(side * k.to(tl.float32), 1)
            side = side * beta[:, None] + load_rows(grad_k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
            store_rows(grad_k_ptr, side, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        system *= -decay_between(sums, rest, each[:, None] > each[None, :], False)
        along_k += tl.sum(system * keys, 1)
        tl.store(grad_beta_ptr + place, grad_beta + along_k, inside)
        system *= beta[:, None]
        total += system
        grad_sums = tl.load(grad_sums_ptr + at + each) + beta * along_k - tl.sum(system * keys, 0)
        # A token's decay is in the sums of all tokens from it on.
        onward = tl.where(each[:, None] >= each[None, :], grad_sums[:, None], 0.0)
        tl.store(grad_decay_ptr + place, tl.sum(onward, 0), inside)
    store_rows(grad_system_ptr, total, key_line, inside, HEADS // SHARED, SIZE, SIZE)


@kernel
def _keys_kernel(
    k_ptr,
    grad_system_ptr,
    tokens_ptr,
    sizes_ptr,
    grad_k_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_PART: tl.constexpr,
):
    """Of a chunk and a key head: the rest of the gradient of k, each of which is in A as a row and as a column."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, sizes_ptr, chunk, SIZE)
    key_line = first * (HEADS // SHARED) + key_head
    system = load_rows(grad_system_ptr, key_line, inside, HEADS // SHARED, SIZE, SIZE)
    system += load_columns(grad_system_ptr, key_line, inside, HEADS // SHARED, SIZE, SIZE)
    for start in range(0, KEY, KEY_PART):
        k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        grad = product(system, k, PRODUCTS)
        grad += load_rows(grad_k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        store_rows(grad_k_ptr, grad, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
