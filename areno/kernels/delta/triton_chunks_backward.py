# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""The gradients of the gated delta rule of packed rows in chunks. Names and formulas as in triton_chunks.py.

With d for gradients, S' for the state behind a chunk, and "lower" with the diagonal:

    dnew = (lower part of exp(g_i - g_j) q_i k_j)^T dout + (exp(g_last - g) k) dS'
    dS = exp(g_last) dS' + (exp(g) q)^T dout - held^T dnew;  dheld = -dnew S^T;  dvalues = dnew
    dsides = inverse^T (dheld, dvalues);  dA = -strictly lower part of (dsides (held, values)^T)

The last line needs no gradient of the inverse: inverse^T dinverse inverse^T is a product of what there is anyway.
g_i's gradient takes, from each factor exp(g_i), what is multiplied with it times its gradient; for q, that is q_i dq_i.

Five kernels: what happens within chunks; the states' gradients, along each row; what chunks have from states; what the
triangular systems have; and what the keys have from A. Each adds to what the ones before it left, so sums have a fixed
order. None is given a result of a product transposed (see `product`): where it would be, it is written and read again,
or computed a second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.row_chunks import RowChunks
from areno.kernels.delta.triton_chunks import (
    Saved,
    chunk_sizes,
    chunk_tokens,
    decay_between,
    decay_to_end,
    load_columns,
    load_rows,
    product,
    store_rows,
)

_VALUES = 32  # columns of a state's gradient that a program takes along a row
_PART = 32  # columns of a state at once, where programs take all of them
_WITHIN, _STATES, _BETWEEN, _SYSTEMS, _KEYS = (
    {"num_warps": warps, "num_stages": stages} for warps, stages in ((8, 1), (4, 2), (8, 1), (8, 1), (8, 1))
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

    At work beside what was saved and the gradients: (3 K + V + C + K V / C) H numbers a token, 104 KiB with H = 32,
    K = V = 128, C = 64. They have 4 bytes; with products in "bf16" all but 2 K H of them have 2.
    """
    n_tokens, n_heads, value_dim = v_NHV.shape
    n_key_heads, key_dim = q_NGK.shape[1:]
    n_rows, (n_chunks, size) = len(chunks.order_R), chunks.tokens_TC.shape
    kept = saved.new_NHV.dtype

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v_NHV.device)

    grad_q_NGK, grad_k_NGK = empty(*q_NGK.shape), empty(*k_NGK.shape)
    grad_v_NHV, grad_decay_NH, grad_beta_NH = empty(*v_NHV.shape), empty(*decay_NH.shape), empty(*beta_NH.shape)
    if not n_tokens:
        return grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH
    sizes = chunk_sizes(q_NGK, v_NHV, chunks, saved.products)
    part = {**sizes, "VALUE_BLOCK": min(_PART, sizes["VALUE_BLOCK"])}
    q_NGK, k_NGK, v_NHV, grad_out_NHV = (each.contiguous() for each in (q_NGK, k_NGK, v_NHV, grad_out_NHV))
    beta_NH, tokens_TC, sums = beta_NH.contiguous(), chunks.tokens_TC, (saved.sums_THC, saved.rest_THC)
    by_chunk = n_heads, n_chunks

    # Of q and k by value heads, which are added up at last.
    part_q_NHK, part_k_NHK = empty(n_tokens, n_heads, key_dim), empty(n_tokens, n_heads, key_dim)
    grad_sums_THC = empty(n_chunks, n_heads, size)
    grad_new_NHV = empty(*v_NHV.shape, dtype=kept)
    _within_kernel[by_chunk](
        grad_out_NHV, q_NGK, k_NGK, *sums, saved.new_NHV, tokens_TC, part_q_NHK, part_k_NHK, grad_new_NHV,
        grad_sums_THC, n_tokens, **sizes, **_WITHIN,
    )  # fmt: skip
    grad_after_THKV = empty(*saved.before_THKV.shape, dtype=kept)
    columns = min(_VALUES, sizes["VALUE_BLOCK"])
    _grad_states_kernel[(triton.cdiv(value_dim, columns), n_heads, n_rows)](
        grad_out_NHV, q_NGK, k_NGK, *sums, saved.held_NHK, grad_new_NHV, grad_after_THKV, chunks.borders,
        chunks.order_R, chunks.firsts_J, **{**sizes, "VALUE_BLOCK": columns}, **_STATES,
    )  # fmt: skip
    grad_held_NHK = empty(*part_k_NHK.shape, dtype=kept)
    _between_kernel[by_chunk](
        grad_out_NHV, q_NGK, k_NGK, *sums, saved.new_NHV, saved.before_THKV, grad_after_THKV, grad_new_NHV, tokens_TC,
        part_q_NHK, part_k_NHK, grad_held_NHK, grad_sums_THC, n_tokens, **part, **_BETWEEN,
    )  # fmt: skip
    del grad_after_THKV
    grad_system_NHC = empty(n_tokens, n_heads, size, dtype=kept)
    _systems_kernel[by_chunk](
        k_NGK, v_NHV, beta_NH, *sums, saved.inverse_NHC, saved.held_NHK, saved.values_NHV, grad_held_NHK,
        grad_new_NHV, tokens_TC, part_k_NHK, grad_sums_THC, grad_system_NHC, grad_v_NHV, grad_beta_NH, n_tokens,
        **sizes, **_SYSTEMS,
    )  # fmt: skip
    _keys_kernel[(n_key_heads, n_chunks)](
        k_NGK, beta_NH, grad_system_NHC, tokens_TC, part_q_NHK, part_k_NHK, grad_sums_THC, grad_q_NGK, grad_k_NGK,
        grad_decay_NH, grad_beta_NH, n_tokens, **sizes, **_KEYS,
    )  # fmt: skip
    return grad_q_NGK, grad_k_NGK, grad_v_NHV, grad_decay_NH, grad_beta_NH


@triton.jit(do_not_specialize=["n_tokens"])
def _within_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    sums_ptr,
    rest_ptr,
    new_ptr,
    tokens_ptr,
    part_q_ptr,
    part_k_ptr,
    grad_new_ptr,
    grad_sums_ptr,
    n_tokens,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Through what the tokens of a chunk have from each other, for a head: gradients of q, k, g and `new`."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, chunk, n_tokens, SIZE)
    each, line, key_line = tl.arange(0, SIZE), first * HEADS + head, first * (HEADS // SHARED) + head // SHARED
    at = (chunk * HEADS + head) * SIZE
    row, column = each[:, None], each[None, :]
    sums, rest = tl.load(sums_ptr + at + each), tl.load(rest_ptr + at + each)
    # What is used twice is loaded twice: registers are what this kernel is short of.
    later = decay_between(sums, rest, row <= column, True)
    k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    turned = product(k, load_columns(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK), PRODUCTS) * later
    grad = load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK)
    store_rows(grad_new_ptr, product(turned, grad, PRODUCTS), line, inside, HEADS, VALUE, VALUE_BLOCK)
    new = load_rows(new_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK)
    turned = product(new, load_columns(grad_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK), PRODUCTS) * later
    q = load_rows(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    part_k = product(turned, q, PRODUCTS)
    store_rows(part_k_ptr, part_k, line, inside, HEADS, KEY, KEY_BLOCK)
    k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    grad_sums = -tl.sum(part_k * k.to(tl.float32), 1)
    grad = load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK)
    seen = product(grad, load_columns(new_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK), PRODUCTS)
    part_q = product(seen * decay_between(sums, rest, row >= column, False), k, PRODUCTS)
    store_rows(part_q_ptr, part_q, line, inside, HEADS, KEY, KEY_BLOCK)
    q = load_rows(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    tl.store(grad_sums_ptr + at + each, grad_sums + tl.sum(part_q * q.to(tl.float32), 1))


@triton.jit
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
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Some columns of the gradients of a head's states behind chunks, from a row's last chunk to its first; and what
    `new` has from them."""
    start, head, place = tl.program_id(0) * VALUE_BLOCK, tl.program_id(1), tl.program_id(2)
    row = tl.load(order_ptr + place)
    begin, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    each, has_key = tl.arange(0, SIZE), tl.arange(0, KEY_BLOCK) < KEY
    n_steps = tl.cdiv(end - begin, SIZE).to(tl.int32)
    grad_state = tl.zeros((KEY_BLOCK, VALUE_BLOCK), tl.float32)
    for back in range(n_steps):
        step = n_steps - 1 - back
        chunk = tl.load(firsts_ptr + step) + place
        first = begin + step * SIZE
        inside, line, key_line = first + each < end, first * HEADS + head, first * (HEADS // SHARED) + head // SHARED
        at = (chunk * HEADS + head) * SIZE
        key_row = (chunk * HEADS + head) * KEY
        store_rows(grad_after_ptr, grad_state, key_row, has_key, 1, VALUE, VALUE_BLOCK, start)
        left, kept = decay_to_end(sums_ptr, rest_ptr, at, SIZE)
        k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
        grad_new = load_rows(grad_new_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK, start).to(tl.float32)
        grad_new += product(k, grad_state, PRODUCTS) * left[:, None]
        store_rows(grad_new_ptr, grad_new, line, inside, HEADS, VALUE, VALUE_BLOCK, start)
        q = load_columns(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
        grad = load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK, start).to(tl.float32)
        grad *= tl.exp(tl.load(sums_ptr + at + each))[:, None]
        held = load_columns(held_ptr, line, inside, HEADS, KEY, KEY_BLOCK)
        grad_state = grad_state * kept + product(q, grad, PRODUCTS) - product(held, grad_new, PRODUCTS)


@triton.jit(do_not_specialize=["n_tokens"])
def _between_kernel(
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
    part_q_ptr,
    part_k_ptr,
    grad_held_ptr,
    grad_sums_ptr,
    n_tokens,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Through the states before and behind a chunk, for a head: the gradient of `held`, more of those of q, k, g."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, chunk, n_tokens, SIZE)
    each, line, key_line = tl.arange(0, SIZE), first * HEADS + head, first * (HEADS // SHARED) + head // SHARED
    at, key_row, has_key = (chunk * HEADS + head) * SIZE, (chunk * HEADS + head) * KEY, tl.arange(0, KEY_BLOCK) < KEY
    part_q = tl.zeros((SIZE, KEY_BLOCK), tl.float32)
    part_k = tl.zeros((SIZE, KEY_BLOCK), tl.float32)
    grad_held = tl.zeros((SIZE, KEY_BLOCK), tl.float32)
    both = tl.zeros((VALUE_BLOCK,), tl.float32)
    for start in range(0, VALUE, VALUE_BLOCK):
        before = load_columns(before_ptr, key_row, has_key, 1, VALUE, VALUE_BLOCK, start)
        grad_after = load_columns(grad_after_ptr, key_row, has_key, 1, VALUE, VALUE_BLOCK, start)
        both += tl.sum(before.to(tl.float32) * grad_after.to(tl.float32), 1)
        part_k += product(load_rows(new_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK, start), grad_after, PRODUCTS)
        part_q += product(load_rows(grad_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK, start), before, PRODUCTS)
        grad_held -= product(load_rows(grad_new_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK, start), before, PRODUCTS)
    store_rows(grad_held_ptr, grad_held, line, inside, HEADS, KEY, KEY_BLOCK)
    left, kept = decay_to_end(sums_ptr, rest_ptr, at, SIZE)
    part_k *= left[:, None]
    k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    to_end = tl.sum(part_k * k.to(tl.float32), 1)
    part_k += load_rows(part_k_ptr, line, inside, HEADS, KEY, KEY_BLOCK)
    store_rows(part_k_ptr, part_k, line, inside, HEADS, KEY, KEY_BLOCK)
    part_q *= tl.exp(tl.load(sums_ptr + at + each))[:, None]
    q = load_rows(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    grad_sums = tl.load(grad_sums_ptr + at + each) + tl.sum(part_q * q.to(tl.float32), 1) - to_end
    grad_sums += tl.where(each == SIZE - 1, tl.sum(to_end, 0) + kept * tl.sum(both, 0), 0.0)
    tl.store(grad_sums_ptr + at + each, grad_sums)
    part_q += load_rows(part_q_ptr, line, inside, HEADS, KEY, KEY_BLOCK)
    store_rows(part_q_ptr, part_q, line, inside, HEADS, KEY, KEY_BLOCK)


@triton.jit(do_not_specialize=["n_tokens"])
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
    part_k_ptr,
    grad_sums_ptr,
    grad_system_ptr,
    grad_v_ptr,
    grad_beta_ptr,
    n_tokens,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Through `held` and `values` of a chunk and a head: the gradient of v, dA exp(g_i - g_j), and more of those of k,
    g and beta."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, chunk, n_tokens, SIZE)
    each, line, key_line = tl.arange(0, SIZE), first * HEADS + head, first * (HEADS // SHARED) + head // SHARED
    at = (chunk * HEADS + head) * SIZE
    sums, rest = tl.load(sums_ptr + at + each), tl.load(rest_ptr + at + each)
    beta = tl.load(beta_ptr + line + each * HEADS, inside, 0.0)
    turned = load_columns(inverse_ptr, line, inside, HEADS, SIZE, SIZE)

    grad_new = load_rows(grad_new_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK)
    grad_side = product(turned, grad_new, PRODUCTS)
    v = load_rows(v_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK).to(tl.float32)
    grad_beta = tl.sum(grad_side * v, 1)
    store_rows(grad_v_ptr, grad_side * beta[:, None], line, inside, HEADS, VALUE, VALUE_BLOCK)
    system = product(grad_side, load_columns(values_ptr, line, inside, HEADS, VALUE, VALUE_BLOCK), PRODUCTS)

    grad_held = load_rows(grad_held_ptr, line, inside, HEADS, KEY, KEY_BLOCK)
    grad_side = product(turned, grad_held, PRODUCTS)
    system += product(grad_side, load_columns(held_ptr, line, inside, HEADS, KEY, KEY_BLOCK), PRODUCTS)
    grad_side *= tl.exp(sums)[:, None]
    k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK).to(tl.float32)
    along_k = tl.sum(grad_side * k, 1)
    tl.store(grad_beta_ptr + line + each * HEADS, grad_beta + along_k, inside)
    tl.store(grad_sums_ptr + at + each, tl.load(grad_sums_ptr + at + each) + along_k * beta)
    part_k = load_rows(part_k_ptr, line, inside, HEADS, KEY, KEY_BLOCK) + grad_side * beta[:, None]
    store_rows(part_k_ptr, part_k, line, inside, HEADS, KEY, KEY_BLOCK)
    system *= decay_between(sums, rest, each[:, None] > each[None, :], False)
    store_rows(grad_system_ptr, -system, line, inside, HEADS, SIZE, SIZE)


@triton.jit(do_not_specialize=["n_tokens"])
def _keys_kernel(
    k_ptr,
    beta_ptr,
    grad_system_ptr,
    tokens_ptr,
    part_q_ptr,
    part_k_ptr,
    grad_sums_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_decay_ptr,
    grad_beta_ptr,
    n_tokens,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Through A of a chunk, for the heads of a key head: the gradients of q, k, beta, and of decay from that of g."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, chunk, n_tokens, SIZE)
    each, key_line = tl.arange(0, SIZE), first * (HEADS // SHARED) + key_head
    total = tl.zeros((SIZE, KEY_BLOCK), tl.float32)
    for head in range(key_head * SHARED, (key_head + 1) * SHARED):
        total += load_rows(part_q_ptr, first * HEADS + head, inside, HEADS, KEY, KEY_BLOCK)
    store_rows(grad_q_ptr, total, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
    total = tl.zeros((SIZE, KEY_BLOCK), tl.float32)
    for head in range(key_head * SHARED, (key_head + 1) * SHARED):
        line, at = first * HEADS + head, (chunk * HEADS + head) * SIZE
        beta = tl.load(beta_ptr + line + each * HEADS, inside, 0.0)
        as_row = product(load_rows(grad_system_ptr, line, inside, HEADS, SIZE, SIZE), k, PRODUCTS)
        turned = load_columns(grad_system_ptr, line, inside, HEADS, SIZE, SIZE).to(tl.float32) * beta[None, :]
        as_column = product(turned, k, PRODUCTS)
        along_row, along_column = tl.sum(as_row * k.to(tl.float32), 1), tl.sum(as_column * k.to(tl.float32), 1)
        total += as_row * beta[:, None] + as_column + load_rows(part_k_ptr, line, inside, HEADS, KEY, KEY_BLOCK)
        place = line + each * HEADS
        tl.store(grad_beta_ptr + place, tl.load(grad_beta_ptr + place, inside, 0.0) + along_row, inside)
        grad_sums = tl.load(grad_sums_ptr + at + each) + beta * along_row - along_column
        # A token's decay is in the sums of all tokens from it on.
        onward = tl.where(each[:, None] >= each[None, :], grad_sums[:, None], 0.0)
        tl.store(grad_decay_ptr + place, tl.sum(onward, 0), inside)
    store_rows(grad_k_ptr, total, key_line, inside, HEADS // SHARED, KEY, KEY_BLOCK)
