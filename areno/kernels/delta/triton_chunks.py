# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""The gated delta rule of packed sequences (rows) in chunks as Triton kernels.

Chunks follow section 3.3 of "Gated Delta Networks" (arXiv 2412.06464) and "Parallelizing Linear Transformers with the
Delta Rule" (arXiv 2406.06484). For a chunk and a value head, let g be the running sums of the logarithms of decay and S
the state before the chunk. q, k, v and the following matrices have one row for each token:

    A = strictly lower part of (beta_i exp(g_i - g_j) k_i k_j);  inverse = (1 + A)^-1
    w = inverse (beta exp(g) k);  u = inverse (beta v);  v_new = u - w S
    out = (exp(g) q) S + lower part of (exp(g_i - g_j) q_i k_j) v_new
    next S = exp(g_last) S + (exp(g_last - g) k)^T v_new

The first kernel computes `inverse`, `w` and `u` of all chunks. The second goes along each row and computes `v_new` and
the states. The third computes the outputs. No argument of exp is above 0. g is stored as a sum of two fp32 numbers, g +
g_low, which is nearly as precise as float64. Saved tensors and sums are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.delta.parts import RowChunks
from areno.kernels.jit import as_constants, kernel, load_masked, program_id_64
from areno.kernels.matmul.triton import dot, dot_precision

# The precision of products if q, k and v are bfloat16. On an H200, "bf16x3" is faster than "tf32", and more precise.
# But `_states_kernel` lacks registers for "bf16x3": it takes 0.72 ms for 16,384 tokens, and 0.53 ms with "tf32", whose
# error is smaller than the rounding of the results to bfloat16.
PRECISION, _STATES_PRECISION = "bf16x3", "tf32"
_PART = 64  # columns of q, k and v in a tile: with small tiles, several programs share a multiprocessor
_ENOUGH = 256  # programs that keep a large GPU busy
_ALL = 1 << 20  # more than any number of columns, so that a tile has all of them
_PREPARE, _STATES, _OUT = (
    {"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 1), (4, 2), (4, 1))
)  # fixed, so that the order of sums never changes
_BASE = tl.constexpr(16)  # rows of the diagonal blocks that are inverted row by row


@dataclass
class SavedTensors:
    """The tensors, fp32, that the backward pass needs. Their names are those of the formulas of this module.

    They take (C + K + 2 V + K V / C) H elements for each token, which is 88 KiB with H = 32, K = V = 128, C = 64.
    `states_THKV` are the states before each chunk. Even a chunk with few tokens has a state of 2 MiB.
    """

    g_THC: Tensor
    g_low_THC: Tensor
    inverse_NHC: Tensor
    w_NHK: Tensor
    u_NHV: Tensor
    v_new_NHV: Tensor
    states_THKV: Tensor


def chunks_forward(
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    chunks: RowChunks,
    initial_RHKV: Tensor | None = None,
    return_states: bool = False,
) -> tuple[Tensor, Tensor | None, SavedTensors]:
    """Return the outputs (N, H, V), final states (None unless `return_states`) and what `chunks_backward` needs.

    q, k and v are bf16 or fp32. With fp32, products are fp32. q and k are normalised, q is scaled. Decays (logarithms),
    beta and states are fp32.
    """
    n_tokens, n_heads, value_dim = v_NHV.shape
    key_dim = q_NGK.shape[2]
    n_rows, (n_chunks, size) = len(chunks.order_R), chunks.tokens_TC.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=v_NHV.device)

    by_chunk, by_token = (n_chunks, n_heads), (n_tokens, n_heads)
    saved = SavedTensors(
        g_THC=empty(*by_chunk, size),
        g_low_THC=empty(*by_chunk, size),
        inverse_NHC=empty(*by_token, size),
        w_NHK=empty(*by_token, key_dim),
        u_NHV=empty(*by_token, value_dim),
        v_new_NHV=empty(*by_token, value_dim),
        states_THKV=empty(*by_chunk, key_dim, value_dim),
    )
    out_NHV = torch.empty(v_NHV.shape, dtype=v_NHV.dtype, device=v_NHV.device)
    final_RHKV = empty(n_rows, n_heads, key_dim, value_dim) if return_states else None
    if initial_RHKV is not None:
        initial_RHKV = initial_RHKV.contiguous()
    sizes = kernel_sizes(q_NGK, v_NHV, chunks, dot_precision(v_NHV, PRECISION))
    places, g = (chunks.tokens_TC, chunks.sizes_T), (saved.g_THC, saved.g_low_THC)
    q_NGK, k_NGK, v_NHV = q_NGK.contiguous(), k_NGK.contiguous(), v_NHV.contiguous()
    if n_tokens:
        inputs = (k_NGK, v_NHV, decay_NH.contiguous(), beta_NH.contiguous())
        results = (saved.inverse_NHC, saved.w_NHK, saved.u_NHV)
        _prepare_kernel[(n_heads, n_chunks)](*inputs, *places, *g, *results, S=sizes, **_PREPARE)
    if n_rows:
        columns = state_columns(v_NHV, n_rows)
        precision = dot_precision(v_NHV, _STATES_PRECISION)
        states = (initial_RHKV, saved.states_THKV, final_RHKV)
        rows = (chunks.borders, chunks.order_R, chunks.first_chunks_J)
        how = kernel_sizes(q_NGK, v_NHV, chunks, precision, _ALL, columns)
        _states_kernel[(triton.cdiv(value_dim, columns), n_heads, n_rows)](
            k_NGK, *g, saved.w_NHK, saved.u_NHV, saved.v_new_NHV, *states, *rows, S=how, **_STATES
        )
    if n_tokens:
        inputs = (q_NGK, k_NGK, *g, saved.v_new_NHV, saved.states_THKV)
        _out_kernel[(n_heads, n_chunks)](*inputs, *places, out_NHV, S=sizes, **_OUT)
    return out_NHV, final_RHKV, saved


class KernelSizes(NamedTuple):
    """The constants of a kernel, which has them as one argument."""

    HEADS: int
    KEY_HEADS: int
    SHARED: int  # heads of a key head
    SIZE: int  # tokens of a chunk
    KEY: int
    VALUE: int
    KEY_PART: int
    VALUE_PART: int
    PRECISION: str


def kernel_sizes(
    q_NGK: Tensor, v_NHV: Tensor, chunks: RowChunks, precision: str, keys: int = _PART, values: int = _PART
) -> KernelSizes:
    """Return the constants of a kernel whose tiles have at most `keys` columns of q and k, and `values` of v.

    Blocks are at least 32 wide: with 16 columns, fp32 products and 8 warps, Triton 3.6 reads outside of shared memory
    on Hopper.
    """
    (n_heads, value), (n_key_heads, key) = v_NHV.shape[1:], q_NGK.shape[1:]
    parts = (min(most, max(32, triton.next_power_of_2(n))) for most, n in ((keys, key), (values, value)))
    of_heads = n_heads, n_key_heads, n_heads // n_key_heads
    return as_constants(KernelSizes(*of_heads, chunks.tokens_TC.shape[1], key, value, *parts, precision))


def state_columns(v_NHV: Tensor, n_rows: int) -> int:
    """Return how many columns of a state matrix one program computes. With few rows, these are fewer."""
    return 64 if n_rows * v_NHV.shape[1] * v_NHV.shape[2] >= 64 * _ENOUGH else 32


@triton.jit
def chunk_tokens(tokens_ptr, sizes_ptr, SIZE: tl.constexpr):
    """Return the program's chunk and its first token, int64, and a mask of the SIZE positions that have a token."""
    chunk = program_id_64(1)
    return chunk, tl.load(tokens_ptr + chunk * SIZE), tl.arange(0, SIZE) < tl.load(sizes_ptr + chunk).to(tl.int32)


@triton.jit
def load_rows(ptr, first, inside, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, start=0):
    """Load columns `start` to `start` + BLOCK of every STEP-th line of a matrix with SIZE columns, zeros outside it.

    `inside` marks the lines that exist. A thread's addresses differ by compile-time constants, which saves registers.
    """
    line, column = tl.arange(0, inside.shape[0])[:, None], start + tl.arange(0, BLOCK)[None, :]
    return load_masked(ptr + first * SIZE + (line * (STEP * SIZE) + column), inside[:, None] & (column < SIZE))


@triton.jit
def load_columns(ptr, first, inside, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, start=0):
    """Load the transpose of the tile that `load_rows` loads, (BLOCK, rows)."""
    line, column = tl.arange(0, inside.shape[0])[None, :], start + tl.arange(0, BLOCK)[:, None]
    return load_masked(ptr + first * SIZE + (line * (STEP * SIZE) + column), inside[None, :] & (column < SIZE))


@triton.jit
def store_rows(ptr, x, first, inside, STEP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, start=0):
    line, column = tl.arange(0, inside.shape[0])[:, None], start + tl.arange(0, BLOCK)[None, :]
    place = ptr + first * SIZE + (line * (STEP * SIZE) + column)
    tl.store(place, x, inside[:, None] & (column < SIZE))


@triton.jit
def decay_between(g, g_low, visible, TRANSPOSED: tl.constexpr):
    """Return exp(g_row - g_column), or exp(g_column - g_row) if TRANSPOSED, and 0 where not `visible`."""
    more = (g[:, None] - g[None, :]) + (g_low[:, None] - g_low[None, :])
    if TRANSPOSED:
        more = -more
    return tl.where(visible, tl.exp(tl.where(visible, more, 0.0)), 0.0)


@triton.jit
def decay_to_end(g_ptr, g_low_ptr, at, SIZE: tl.constexpr):
    """Return exp(g_last - g) and exp(g_last) of the chunk whose SIZE sums begin at `at`."""
    each, last = at + tl.arange(0, SIZE), at + SIZE - 1
    end = tl.load(g_ptr + last)
    more = (end - tl.load(g_ptr + each)) + (tl.load(g_low_ptr + last) - tl.load(g_low_ptr + each))
    return tl.exp(more), tl.exp(end)


@triton.jit
def _diagonal_blocks_mask(SIZE: tl.constexpr):
    """Return whether each element of a SIZE x SIZE matrix lies in one of the 16 x 16 blocks on its diagonal."""
    block = tl.arange(0, SIZE) // _BASE
    return block[:, None] == block[None, :]


@triton.jit
def _diagonal_blocks(x, SIZE: tl.constexpr):
    BLOCKS: tl.constexpr = SIZE // _BASE
    x = tl.where(_diagonal_blocks_mask(SIZE), x, 0.0)
    return tl.sum(tl.reshape(x, (BLOCKS, _BASE, BLOCKS, _BASE)), axis=2)


@triton.jit
def _inverse(system, transposed, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (1 + system)^-1 of a strictly lower triangular `system`. `transposed` has its transposed diagonal blocks.

    First the diagonal blocks are inverted row by row, all blocks at once, so that each of 4 warps has one block. Then
    the inverses x and z of two neighbouring diagonal blocks are joined to the inverse ((x, 0), (-z y x, z)), where y is
    the block of `system` below x and left of z. No large terms cancel, unlike in a series of powers.
    """
    BLOCKS: tl.constexpr = SIZE // _BASE
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    small_row, small_column = tl.arange(0, _BASE)[None, :, None], tl.arange(0, _BASE)[None, None, :]
    blocks = tl.where(small_row == small_column, 1.0, 0.0) + tl.zeros((BLOCKS, _BASE, _BASE), tl.float32)
    for i in range(1, _BASE):
        line = tl.sum(tl.where(small_column == i, transposed, 0.0), axis=2)
        earlier = tl.sum(line[:, :, None] * blocks, axis=1)
        blocks = tl.where(small_row == i, blocks - earlier[:, None, :], blocks)
    spread = blocks[:, :, None, :] + tl.zeros((BLOCKS, _BASE, BLOCKS, _BASE), tl.float32)
    whole = tl.where(_diagonal_blocks_mask(SIZE), tl.reshape(spread, (SIZE, SIZE)), 0.0)
    if BLOCKS >= 2:
        below = tl.where((row // _BASE == column // _BASE + 1) & (row // _BASE % 2 == 1), system, 0.0)
        below = dot(below, whole, PRECISION)
        whole -= dot(whole, below, PRECISION)
    if BLOCKS >= 4:
        below = tl.where((row >= SIZE // 2) & (column < SIZE // 2), system, 0.0)
        below = dot(below, whole, PRECISION)
        whole -= dot(whole, below, PRECISION)
    return whole


@kernel
def _prepare_kernel(
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    tokens_ptr,
    sizes_ptr,
    g_ptr,
    g_low_ptr,
    inverse_ptr,
    w_ptr,
    u_ptr,
    S: tl.constexpr,
):
    head = tl.program_id(0)
    chunk, first, inside = chunk_tokens(tokens_ptr, sizes_ptr, S.SIZE)
    each, line = tl.arange(0, S.SIZE), first * S.HEADS + head
    g = tl.cumsum(load_masked(decay_ptr + line + each * S.HEADS, inside).to(tl.float64), 0)
    rounded = g.to(tl.float32)
    at = (chunk * S.HEADS + head) * S.SIZE
    tl.store(g_ptr + at + each, rounded)
    g_low = (g - rounded.to(tl.float64)).to(tl.float32)
    tl.store(g_low_ptr + at + each, g_low)
    beta = load_masked(beta_ptr + line + each * S.HEADS, inside)
    key_line = first * S.KEY_HEADS + head // S.SHARED
    keys = tl.zeros((S.SIZE, S.SIZE), tl.float32)
    for start in range(0, S.KEY, S.KEY_PART):
        k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        keys += dot(k, tl.trans(k), S.PRECISION)
    row, column = each[:, None], each[None, :]
    transposed = beta[None, :] * decay_between(rounded, g_low, row < column, True) * keys
    transposed = _diagonal_blocks(transposed, S.SIZE)
    system = beta[:, None] * decay_between(rounded, g_low, row > column, False) * keys
    inverse = _inverse(system, transposed, S.SIZE, S.PRECISION)
    store_rows(inverse_ptr, inverse, line, inside, S.HEADS, S.SIZE, S.SIZE)
    # The factors are multiplied into the inverse, not into k and v, which would be rounded again.
    scaled = inverse * (beta * tl.exp(rounded))[None, :]
    for start in range(0, S.KEY, S.KEY_PART):
        k = load_rows(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        store_rows(w_ptr, dot(scaled, k, S.PRECISION), line, inside, S.HEADS, S.KEY, S.KEY_PART, start)
    scaled = inverse * beta[None, :]
    for start in range(0, S.VALUE, S.VALUE_PART):
        v = load_rows(v_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
        store_rows(u_ptr, dot(scaled, v, S.PRECISION), line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)


@kernel
def _states_kernel(
    k_ptr,
    g_ptr,
    g_low_ptr,
    w_ptr,
    u_ptr,
    v_new_ptr,
    initial_ptr,
    states_ptr,
    final_ptr,
    borders_ptr,
    order_ptr,
    first_chunks_ptr,
    S: tl.constexpr,
):
    """In each program, compute VALUE_PART columns of one head's states, and of `v_new`, along one row."""
    start, head, place = tl.program_id(0) * S.VALUE_PART, tl.program_id(1), tl.program_id(2)
    row = tl.load(order_ptr + place)
    begin, end = tl.load(borders_ptr + row), tl.load(borders_ptr + row + 1)
    has_key = tl.arange(0, S.KEY_PART) < S.KEY
    state = tl.zeros((S.KEY_PART, S.VALUE_PART), tl.float32)
    if initial_ptr is not None:
        state += load_rows(initial_ptr, (row * S.HEADS + head) * S.KEY, has_key, 1, S.VALUE, S.VALUE_PART, start)
    for step in range(tl.cdiv(end - begin, S.SIZE).to(tl.int32)):
        chunk = tl.load(first_chunks_ptr + step) + place
        first = begin + step * S.SIZE
        inside, line = tl.arange(0, S.SIZE) < (end - first).to(tl.int32), first * S.HEADS + head
        store_rows(states_ptr, state, (chunk * S.HEADS + head) * S.KEY, has_key, 1, S.VALUE, S.VALUE_PART, start)
        w = load_rows(w_ptr, line, inside, S.HEADS, S.KEY, S.KEY_PART)
        v_new = load_rows(u_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start) - dot(w, state, S.PRECISION)
        store_rows(v_new_ptr, v_new, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
        left, kept = decay_to_end(g_ptr, g_low_ptr, (chunk * S.HEADS + head) * S.SIZE, S.SIZE)
        key_line = first * S.KEY_HEADS + head // S.SHARED
        k = load_columns(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART)
        state = state * kept + dot(k, v_new * left[:, None], S.PRECISION)
    if final_ptr is not None:
        store_rows(final_ptr, state, (row * S.HEADS + head) * S.KEY, has_key, 1, S.VALUE, S.VALUE_PART, start)


@kernel
def _out_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    g_low_ptr,
    v_new_ptr,
    states_ptr,
    tokens_ptr,
    sizes_ptr,
    out_ptr,
    S: tl.constexpr,
):
    head = tl.program_id(0)
    chunk, first, inside = chunk_tokens(tokens_ptr, sizes_ptr, S.SIZE)
    each, line, key_line = tl.arange(0, S.SIZE), first * S.HEADS + head, first * S.KEY_HEADS + head // S.SHARED
    at, row, column = (chunk * S.HEADS + head) * S.SIZE, each[:, None], each[None, :]
    scores = tl.zeros((S.SIZE, S.SIZE), tl.float32)
    for start in range(0, S.KEY, S.KEY_PART):
        q = load_rows(q_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        k = load_columns(k_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, start)
        scores += dot(q, k, S.PRECISION)
    g, g_low = tl.load(g_ptr + at + each), tl.load(g_low_ptr + at + each)
    scores *= decay_between(g, g_low, row >= column, False)
    for start in range(0, S.VALUE, S.VALUE_PART):
        out = tl.zeros((S.SIZE, S.VALUE_PART), tl.float32)
        for key in range(0, S.KEY, S.KEY_PART):
            q = load_rows(q_ptr, key_line, inside, S.KEY_HEADS, S.KEY, S.KEY_PART, key)
            has_key = key + tl.arange(0, S.KEY_PART) < S.KEY
            key_row = (chunk * S.HEADS + head) * S.KEY + key
            out += dot(q, load_rows(states_ptr, key_row, has_key, 1, S.VALUE, S.VALUE_PART, start), S.PRECISION)
        out *= tl.exp(g)[:, None]  # after the product, so that q is not rounded again
        out += dot(scores, load_rows(v_new_ptr, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start), S.PRECISION)
        store_rows(out_ptr, out, line, inside, S.HEADS, S.VALUE, S.VALUE_PART, start)
