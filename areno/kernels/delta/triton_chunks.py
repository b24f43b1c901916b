# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""The gated delta rule of packed rows in chunks, forward; triton_chunks_backward.py has its gradients.

Chunks as in section 3.3 of the paper and in "Parallelizing Linear Transformers with the Delta Rule" (Yang et al. 2024,
arXiv 2406.06484). For a chunk and a value head, with g the sums of the logarithms of decay up to each of its tokens, S
the state before it, and a row for each token in q, k, v and what follows:

    A = strictly lower part of (beta_i exp(g_i - g_j) k_i k_j);  inverse = (1 + A)^-1
    held = inverse (beta exp(g) k);  values = inverse (beta v);  new = values - held S
    out = (exp(g) q) S + lower part of (exp(g_i - g_j) q_i k_j) new
    next S = exp(g_last) S + (exp(g_last - g) k)^T new

Three kernels: `inverse`, `held` and `values` of all chunks; `new` and the states, along each row; the results. No
exponent is above 0. g is in fp32, what it lacks of float64 beside it; all that is kept and all sums are in fp32.

Letters as in the package and in `parts.py`. Blocks of K and V are padded to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.backend import is_before_ampere
from areno.kernels.delta.parts import RowChunks
from areno.kernels.jit import kernel

# How products are made where q, k and v are bfloat16: "split", with operands as sums of two bfloat16, is faster on an
# H200 than "tf32", and more precise. Only the kernel along rows lacks registers for the parts: 0.72 ms for 16,384
# tokens, and 0.53 ms with TF32, which leaves less error than the results have in bfloat16 anyway.
PRODUCTS, _STATES_PRODUCTS = "split", "tf32"
_PART = 64  # columns of q, k, v at once: small tiles leave room for several programs on a processor
_ENOUGH = 256  # programs that a large GPU is busy with
_ALL = 1 << 20
_PREPARE, _STATES, _OUT = (
    {"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 1), (4, 2), (4, 1))
)  # of kernels; fixed, so that two runs add in one order
_BASE = tl.constexpr(16)  # rows of the blocks that are inverted row by row


@dataclass
class Saved:
    """What a forward pass leaves for the backward pass.

    For N tokens, in fp32: (C + K + 2 V + K V / C) H numbers a token, which are 88 KiB with H = 32, K = V = 128, C = 64.
    States are kept for each chunk, however few tokens it has: 2 MiB with these sizes, so rows that are much shorter
    than a chunk take more. sums_THC, rest_THC: g, and what g lacks of float64. before_THKV: the states before chunks.
    """

    sums_THC: Tensor
    rest_THC: Tensor
    inverse_NHC: Tensor
    held_NHK: Tensor
    values_NHV: Tensor
    new_NHV: Tensor
    before_THKV: Tensor


def chunks_forward(
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    chunks: RowChunks,
    before_RHKV: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None, Saved]:
    """The results (N, H, V) in the dtype of v; with `keep` the states behind rows (R, H, K, V), fp32; what it saved.

    q_NGK, k_NGK, v_NHV: bf16, or fp32, whose products are then of fp32; q is scaled. decay_NH (logarithm, not above 0)
    and beta_NH: fp32. before_RHKV: the states before rows, fp32, where these are not zero.
    """
    n_tokens, n_heads, value_dim = v_NHV.shape
    key_dim = q_NGK.shape[2]
    n_rows, (n_chunks, size) = len(chunks.order_R), chunks.tokens_TC.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=v_NHV.device)

    saved = Saved(
        empty(n_chunks, n_heads, size),
        empty(n_chunks, n_heads, size),
        empty(n_tokens, n_heads, size),
        empty(n_tokens, n_heads, key_dim),
        empty(n_tokens, n_heads, value_dim),
        empty(n_tokens, n_heads, value_dim),
        empty(n_chunks, n_heads, key_dim, value_dim),
    )
    out_NHV = torch.empty(v_NHV.shape, dtype=v_NHV.dtype, device=v_NHV.device)
    after_RHKV = empty(n_rows, n_heads, key_dim, value_dim) if keep else None
    if before_RHKV is not None:
        before_RHKV = before_RHKV.contiguous()
    sizes = kernel_sizes(q_NGK, v_NHV, chunks, products_of(v_NHV, PRODUCTS))
    places = (chunks.tokens_TC, chunks.sizes_T)
    q_NGK, k_NGK, v_NHV = q_NGK.contiguous(), k_NGK.contiguous(), v_NHV.contiguous()
    if n_tokens:
        _prepare_kernel[(n_heads, n_chunks)](
            k_NGK, v_NHV, decay_NH.contiguous(), beta_NH.contiguous(), *places, saved.sums_THC, saved.rest_THC,
            saved.inverse_NHC, saved.held_NHK, saved.values_NHV, **sizes, **_PREPARE,
        )  # fmt: skip
    if n_rows:
        columns = state_columns(v_NHV, n_rows)
        _states_kernel[(triton.cdiv(value_dim, columns), n_heads, n_rows)](
            k_NGK, saved.sums_THC, saved.rest_THC, saved.held_NHK, saved.values_NHV, saved.new_NHV, before_RHKV,
            saved.before_THKV, after_RHKV, chunks.borders, chunks.order_R, chunks.firsts_J,
            **kernel_sizes(q_NGK, v_NHV, chunks, products_of(v_NHV, _STATES_PRODUCTS), _ALL, columns), **_STATES,
        )  # fmt: skip
    if n_tokens:
        _out_kernel[(n_heads, n_chunks)](
            q_NGK, k_NGK, saved.sums_THC, saved.rest_THC, saved.new_NHV, saved.before_THKV, *places, out_NHV,
            **sizes, **_OUT,
        )  # fmt: skip
    return out_NHV, after_RHKV, saved


def products_of(v: Tensor, rounded: str) -> str:
    """Return how operands of products are rounded: `rounded` in bf16. In fp32 three products of TF32 are as good."""
    if v.dtype == torch.bfloat16:
        return rounded
    return "tf32x3" if v.is_cuda and not is_before_ampere(v.device) else "ieee"


def kernel_sizes(
    q_NGK: Tensor, v_NHV: Tensor, chunks: RowChunks, products: str, keys: int = _PART, values: int = _PART
) -> dict[str, Any]:
    """What a kernel is compiled for. keys, values: how many columns a program takes at once, at the most.

    Blocks are at least 32 wide: of 16 columns, with products of fp32 and 8 warps, Triton 3.6 reads outside of shared
    memory on Hopper.
    """
    n_heads, (key, value) = v_NHV.shape[1], (q_NGK.shape[2], v_NHV.shape[2])
    return {
        "PRODUCTS": products,
        "HEADS": n_heads,
        "SHARED": n_heads // q_NGK.shape[1],
        "SIZE": chunks.tokens_TC.shape[1],
        "KEY": key,
        "VALUE": value,
        "KEY_PART": min(keys, max(32, triton.next_power_of_2(key))),
        "VALUE_PART": min(values, max(32, triton.next_power_of_2(value))),
    }


def state_columns(v_NHV: Tensor, n_rows: int) -> int:
    """How many columns of a state a program takes along a row: fewer where there are few rows, as each is a walk."""
    return 64 if n_rows * v_NHV.shape[1] * v_NHV.shape[2] >= 64 * _ENOUGH else 32


@triton.jit
def product(a, b, PRODUCTS: tl.constexpr):
    """a b in fp32. What comes out of another product must not be given transposed: on Hopper, Triton 3.4 to 3.7.0 then
    gives wrong numbers (github.com/fla-org/flash-linear-attention/issues/640)."""
    if PRODUCTS == "bf16" or (a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16):  # the latter is exact
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRODUCTS == "split":
        return _product_of_parts(a, b)
    elif PRODUCTS == "tf32":
        return tl.dot(_to_tf32(a), _to_tf32(b), input_precision="tf32")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRODUCTS)


@triton.jit
def _product_of_parts(a, b):
    """Without that of two small parts. The small numbers are added first."""
    if a.dtype == tl.bfloat16:
        high, low = _parts(b)
        return tl.dot(a, high, acc=tl.dot(a, low))
    elif b.dtype == tl.bfloat16:
        high, low = _parts(a)
        return tl.dot(high, b, acc=tl.dot(low, b))
    else:
        high, low = _parts(a)
        other_high, other_low = _parts(b)
        total = tl.dot(low, other_high)
        total = tl.dot(high, other_low, acc=total)
        return tl.dot(high, other_high, acc=total)


@triton.jit
def _parts(x):
    """fp32 as the sum of two bfloat16, which have 16 of its 24 bits.

    The first is rounded by its bits, as a GPU converts pairs of numbers faster than single ones. That may make 0 of
    NaN, but then the second is NaN.
    """
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    low = (x - high).to(tl.bfloat16)
    return high.to(tl.bfloat16), low


@triton.jit
def _to_tf32(x):
    """Rounded to the nearest, as a matrix unit would cut the last bits off: all errors would have one sign."""
    if x.dtype == tl.float32:
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # the bits of a NaN may be those of -0 after that
    else:
        return x.to(tl.float32)


@triton.jit
def chunk_tokens(tokens_ptr, sizes_ptr, chunk, SIZE: tl.constexpr):
    """The first token of a chunk, int64, and which of its places have one."""
    return tl.load(tokens_ptr + chunk * SIZE), tl.arange(0, SIZE) < tl.load(sizes_ptr + chunk).to(tl.int32)


@triton.jit
def load_rows(ptr, first, inside, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, start=0):
    """Every STEP-th line of SIZE numbers, from the line `first` on: (lines, BLOCK), zeros outside.

    start: the first number of each. What differs between the addresses of a thread is constant, or they would take
    more registers than the numbers.
    """
    line, column = tl.arange(0, inside.shape[0])[:, None], start + tl.arange(0, BLOCK)[None, :]
    return tl.load(ptr + first * SIZE + (line * (STEP * SIZE) + column), inside[:, None] & (column < SIZE), 0.0)


@triton.jit
def load_columns(ptr, first, inside, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, start=0):
    """The same, transposed: (BLOCK, lines)."""
    line, column = tl.arange(0, inside.shape[0])[None, :], start + tl.arange(0, BLOCK)[:, None]
    return tl.load(ptr + first * SIZE + (line * (STEP * SIZE) + column), inside[None, :] & (column < SIZE), 0.0)


@triton.jit
def store_rows(ptr, x, first, inside, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, start=0):
    """The other way."""
    line, column = tl.arange(0, inside.shape[0])[:, None], start + tl.arange(0, BLOCK)[None, :]
    place = ptr + first * SIZE + (line * (STEP * SIZE) + column)
    tl.store(place, x.to(ptr.dtype.element_ty), inside[:, None] & (column < SIZE))


@triton.jit
def decay_between(sums, rest, seen, TURNED: tl.constexpr):
    """exp(g_row - g_column) where `seen`, else 0; TURNED: exp(g_column - g_row)."""
    more = (sums[:, None] - sums[None, :]) + (rest[:, None] - rest[None, :])
    if TURNED:
        more = -more
    return tl.where(seen, tl.exp(tl.where(seen, more, 0.0)), 0.0)


@triton.jit
def decay_to_end(sums_ptr, rest_ptr, at, SIZE: tl.constexpr):
    """exp(g_last - g) of each token, and exp(g_last)."""
    each, last = at + tl.arange(0, SIZE), at + SIZE - 1
    end = tl.load(sums_ptr + last)
    more = (end - tl.load(sums_ptr + each)) + (tl.load(rest_ptr + last) - tl.load(rest_ptr + each))
    return tl.exp(more), tl.exp(end)


@triton.jit
def _on_diagonal(SIZE: tl.constexpr):
    """Which places of a matrix are in the blocks on its diagonal."""
    block = tl.arange(0, SIZE) // _BASE
    return block[:, None] == block[None, :]


@triton.jit
def _diagonal_blocks(x, SIZE: tl.constexpr):
    """(SIZE / 16, 16, 16)."""
    BLOCKS: tl.constexpr = SIZE // _BASE
    x = tl.where(_on_diagonal(SIZE), x, 0.0)
    return tl.sum(tl.reshape(x, (BLOCKS, _BASE, BLOCKS, _BASE)), axis=2)


@triton.jit
def _inverse(system, turned, SIZE: tl.constexpr, PRODUCTS: tl.constexpr):
    """(1 + system)^-1 of a strictly lower matrix. turned: the blocks on the diagonal of its transpose.

    These row by row, all at once, so that with 4 warps each has one. Then two neighbours x, z with y below x become
    ((x, 0), (-z y x, z)). No large terms cancel, unlike in a series of powers.
    """
    BLOCKS: tl.constexpr = SIZE // _BASE
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    small_row, small_column = tl.arange(0, _BASE)[None, :, None], tl.arange(0, _BASE)[None, None, :]
    blocks = tl.where(small_row == small_column, 1.0, 0.0) + tl.zeros((BLOCKS, _BASE, _BASE), tl.float32)
    for i in range(1, _BASE):
        line = tl.sum(tl.where(small_column == i, turned, 0.0), axis=2)
        earlier = tl.sum(line[:, :, None] * blocks, axis=1)
        blocks = tl.where(small_row == i, blocks - earlier[:, None, :], blocks)
    spread = blocks[:, :, None, :] + tl.zeros((BLOCKS, _BASE, BLOCKS, _BASE), tl.float32)
    whole = tl.where(_on_diagonal(SIZE), tl.reshape(spread, (SIZE, SIZE)), 0.0)
    if BLOCKS >= 2:
        below = tl.where((row // _BASE == column // _BASE + 1) & (row // _BASE % 2 == 1), system, 0.0)
        below = product(below, whole, PRODUCTS)
        whole -= product(whole, below, PRODUCTS)
    if BLOCKS >= 4:
        below = tl.where((row >= SIZE // 2) & (column < SIZE // 2), system, 0.0)
        below = product(below, whole, PRODUCTS)
        whole -= product(whole, below, PRODUCTS)
    return whole


@kernel
def _prepare_kernel(
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    tokens_ptr,
    sizes_ptr,
    sums_ptr,
    rest_ptr,
    inverse_ptr,
    held_ptr,
    values_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_PART: tl.constexpr,
):
    """`inverse`, `held` and `values` of a chunk and a head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, sizes_ptr, chunk, SIZE)
    each, line = tl.arange(0, SIZE), first * HEADS + head
    sums = tl.cumsum(tl.load(decay_ptr + line + each * HEADS, inside, 0.0).to(tl.float64), 0)
    rounded = sums.to(tl.float32)
    at = (chunk * HEADS + head) * SIZE
    tl.store(sums_ptr + at + each, rounded)
    rest = (sums - rounded.to(tl.float64)).to(tl.float32)
    tl.store(rest_ptr + at + each, rest)
    beta = tl.load(beta_ptr + line + each * HEADS, inside, 0.0)
    key_line = first * (HEADS // SHARED) + head // SHARED
    keys = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, KEY, KEY_PART):
        k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        keys += product(k, tl.trans(k), PRODUCTS)
    row, column = each[:, None], each[None, :]
    turned = beta[None, :] * decay_between(rounded, rest, row < column, True) * keys
    turned = _diagonal_blocks(turned, SIZE)
    system = beta[:, None] * decay_between(rounded, rest, row > column, False) * keys
    inverse = _inverse(system, turned, SIZE, PRODUCTS)
    store_rows(inverse_ptr, inverse, line, inside, HEADS, SIZE, SIZE)
    # Factors go to the inverse, so that k and v are not rounded again.
    scaled = inverse * (beta * tl.exp(rounded))[None, :]
    for start in range(0, KEY, KEY_PART):
        k = load_rows(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        store_rows(held_ptr, product(scaled, k, PRODUCTS), line, inside, HEADS, KEY, KEY_PART, start)
    scaled = inverse * beta[None, :]
    for start in range(0, VALUE, VALUE_PART):
        v = load_rows(v_ptr, line, inside, HEADS, VALUE, VALUE_PART, start)
        store_rows(values_ptr, product(scaled, v, PRODUCTS), line, inside, HEADS, VALUE, VALUE_PART, start)


@kernel
def _states_kernel(
    k_ptr,
    sums_ptr,
    rest_ptr,
    held_ptr,
    values_ptr,
    new_ptr,
    first_ptr,
    before_ptr,
    after_ptr,
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
    """Some columns of a head's state along a row: the states before chunks, and what their tokens write."""
    start, head, place = tl.program_id(0) * VALUE_PART, tl.program_id(1), tl.program_id(2)
    row = tl.load(order_ptr + place)
    begin, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    has_key = tl.arange(0, KEY_PART) < KEY
    state = tl.zeros((KEY_PART, VALUE_PART), tl.float32)
    if first_ptr is not None:
        state += load_rows(first_ptr, (row * HEADS + head) * KEY, has_key, 1, VALUE, VALUE_PART, start)
    for step in range(tl.cdiv(end - begin, SIZE).to(tl.int32)):
        chunk = tl.load(firsts_ptr + step) + place
        first = begin + step * SIZE
        inside, line = tl.arange(0, SIZE) < (end - first).to(tl.int32), first * HEADS + head
        store_rows(before_ptr, state, (chunk * HEADS + head) * KEY, has_key, 1, VALUE, VALUE_PART, start)
        held = load_rows(held_ptr, line, inside, HEADS, KEY, KEY_PART)
        new = load_rows(values_ptr, line, inside, HEADS, VALUE, VALUE_PART, start) - product(held, state, PRODUCTS)
        store_rows(new_ptr, new, line, inside, HEADS, VALUE, VALUE_PART, start)
        left, kept = decay_to_end(sums_ptr, rest_ptr, (chunk * HEADS + head) * SIZE, SIZE)
        key_line = first * (HEADS // SHARED) + head // SHARED
        k = load_columns(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART)
        state = state * kept + product(k, new * left[:, None], PRODUCTS)
    if after_ptr is not None:
        store_rows(after_ptr, state, (row * HEADS + head) * KEY, has_key, 1, VALUE, VALUE_PART, start)


@kernel
def _out_kernel(
    q_ptr,
    k_ptr,
    sums_ptr,
    rest_ptr,
    new_ptr,
    before_ptr,
    tokens_ptr,
    sizes_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_PART: tl.constexpr,
):
    """The results of a chunk and a head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, inside = chunk_tokens(tokens_ptr, sizes_ptr, chunk, SIZE)
    each, line, key_line = tl.arange(0, SIZE), first * HEADS + head, first * (HEADS // SHARED) + head // SHARED
    at, row, column = (chunk * HEADS + head) * SIZE, each[:, None], each[None, :]
    seen = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, KEY, KEY_PART):
        q = load_rows(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        k = load_columns(k_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, start)
        seen += product(q, k, PRODUCTS)
    sums, rest = tl.load(sums_ptr + at + each), tl.load(rest_ptr + at + each)
    seen *= decay_between(sums, rest, row >= column, False)
    for start in range(0, VALUE, VALUE_PART):
        out = tl.zeros((SIZE, VALUE_PART), tl.float32)
        for key in range(0, KEY, KEY_PART):
            q = load_rows(q_ptr, key_line, inside, HEADS // SHARED, KEY, KEY_PART, key)
            has_key = key + tl.arange(0, KEY_PART) < KEY
            key_row = (chunk * HEADS + head) * KEY + key
            out += product(q, load_rows(before_ptr, key_row, has_key, 1, VALUE, VALUE_PART, start), PRODUCTS)
        out *= tl.exp(sums)[:, None]  # after the product, so that q is not rounded again
        out += product(seen, load_rows(new_ptr, line, inside, HEADS, VALUE, VALUE_PART, start), PRODUCTS)
        store_rows(out_ptr, out, line, inside, HEADS, VALUE, VALUE_PART, start)
