# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false
"""Attention of a split over cached positions, for the kernel in `triton.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from areno.kernels.fp8.triton import decode, decode_pairs, load_exponents, scales
from areno.kernels.jit import load_masked

TILE = tl.constexpr(32)  # positions loaded together, a power of two that divides `PagedBatch.split_lens`


@triton.jit
def _attend_codes(
    q,
    softmax,
    span,
    cache,
    exponents,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Do `attend` over an FP8 cache.

    Products take codes; scales are factors of scores and of weights. 16-bit products are in float16, because GPUs
    convert two codes to it in one instruction. Powers of 2 bring queries and weights into its range. Values are loaded
    as pairs of codes: matrix instructions need columns of them, and shared memory gives columns of 16 bits only.
    """
    best, total, acc = softmax
    start, end, least = span
    k_ptr, v_ptr, table_row, _ = cache
    k_exponents_ptr, v_exponents_ptr = exponents
    PRODUCT: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    ROWS: tl.constexpr = q.shape[0]
    dim, pair = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM // 2)
    v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    pair_stride = tl.num_programs(0) * (HEAD_DIM // 2)
    first_best = best
    unit = tl.where(tl.float32 == PRODUCT, 127, 0)  # exponent of the scale of `even` and `odd`
    even = tl.zeros([ROWS, PADDED_DIM // 2], tl.float32)
    odd = tl.zeros([ROWS, PADDED_DIM // 2], tl.float32)
    if tl.float16 == PRODUCT:
        of_q = tl.max(tl.abs(q.to(tl.float32)).to(tl.int32, bitcast=True), axis=1) >> 23
        of_q = tl.maximum(of_q, 15)
        q = (q.to(tl.float32) * scales(268 - of_q)[:, None]).to(tl.float16)  # at most 2^15
        scale = scale * scales(of_q - 14)[:, None]
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < end
        if BLOCK_SIZE % TILE.value == 0:
            block = tl.load(table_row + first // BLOCK_SIZE).to(tl.int64)
            offset = first % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            block = load_masked(table_row + position // BLOCK_SIZE, inside).to(tl.int64)
            offset = position % BLOCK_SIZE
        base = (block * BLOCK_SIZE + offset) * pair_stride
        exponent_place = block * (tl.num_programs(0) * BLOCK_SIZE) + offset
        k_place = (2 * base)[None, :] + dim[:, None]
        codes = load_masked(k_ptr + k_place, inside[None, :] & (dim < HEAD_DIM)[:, None])
        scores = tl.dot(q, decode(codes, PRODUCT), input_precision="ieee") * scale
        scores *= scales(load_exponents(k_exponents_ptr, exponent_place, inside))[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        if WINDOW is not None:
            scores = tl.where(position[None, :] >= least[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        origin = new_best
        if WINDOW is not None:
            origin = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - origin[:, None])
        decay = tl.exp2(best - origin)
        total = total * decay + tl.sum(weights, axis=1)
        best = new_best
        pairs = load_masked(v_ptr + base[:, None] + pair[None, :], inside[:, None] & (pair < HEAD_DIM // 2)[None, :])
        even_v, odd_v = decode_pairs(pairs, PRODUCT)
        of_v = load_exponents(v_exponents_ptr, exponent_place, inside)
        if tl.float16 == PRODUCT:
            new_unit = tl.maximum(unit, tl.max(of_v, axis=0) - 14)  # so that weights are at most 2^14
            decay *= scales(tl.maximum(unit - new_unit + 127, 0))
            of_v = tl.maximum(of_v - new_unit + 127, 1)
            unit = new_unit
        weights = (weights * scales(of_v)[None, :]).to(PRODUCT)
        even = tl.dot(weights, even_v, acc=even * decay[:, None], input_precision="ieee")
        odd = tl.dot(weights, odd_v, acc=odd * decay[:, None], input_precision="ieee")
    of_codes = tl.join(even, odd).reshape(ROWS, PADDED_DIM) * scales(unit)
    decay = tl.where(first_best > float("-inf"), tl.exp2(first_best - best), 0.0)
    return best, total, of_codes + decay[:, None] * acc


@triton.jit
def _attend_values(
    q,
    softmax,
    span,
    cache,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Do `attend` over a cache of values."""
    best, total, acc = softmax
    start, end, least = span
    k_ptr, v_ptr, table_row, stride = cache
    dim = tl.arange(0, PADDED_DIM)
    real_dim = dim < HEAD_DIM
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < end
        if BLOCK_SIZE % TILE.value == 0:  # the tile lies in one block, as splits begin at multiples of TILE
            block = tl.load(table_row + first // BLOCK_SIZE).to(tl.int64)
            base = block * (BLOCK_SIZE * stride) + (first % BLOCK_SIZE + tl.arange(0, TILE)) * stride
        else:
            block = load_masked(table_row + position // BLOCK_SIZE, inside).to(tl.int64)
            base = block * (BLOCK_SIZE * stride) + (position % BLOCK_SIZE) * stride
        k = tl.load(k_ptr + base[None, :] + dim[:, None], mask=inside[None, :] & real_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        if WINDOW is not None:
            scores = tl.where(position[None, :] >= least[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        origin = new_best
        if WINDOW is not None:  # all positions so far may be before the window
            origin = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - origin[:, None])
        decay = tl.exp2(best - origin)
        v = tl.load(v_ptr + base[:, None] + dim[None, :], mask=inside[:, None] & real_dim[None, :], other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        best = new_best
    return best, total, acc


@triton.jit
def attend(
    q,
    softmax,
    span,
    cache,
    exponents,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Add positions of one table row and one key head to `softmax`, a running softmax (best, total, acc).

    `span` is (first position, end, least position): with a WINDOW, each query attends only to positions from the least
    on. `cache` is (keys, values, table row, elements of a position). With `exponents` of keys, values, it is in FP8.
    """
    if exponents[0] is not None:
        return _attend_codes(q, softmax, span, cache, exponents, scale, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW)
    else:
        return _attend_values(q, softmax, span, cache, scale, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW)
