# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Paged decode attention in a fixed order, as two Triton kernels.

The first kernel computes partial results over parts of a row's positions, and the second combines these results. The
first part of a row may cover several spans of keys, whose results are then combined in the first kernel. Each later
part is one span. `kernels/fixed_order/triton.py` describes the operations whose order is fixed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.fixed_order.reference import SPAN
from areno.kernels.fixed_order.triton import (
    LOG2_E,
    TILE,
    empty_softmax,
    join_spans,
    n_spans,
    rescale_factors,
    span_start,
    total_with_sink,
    with_contiguous_heads,
)
from areno.kernels.fp8.triton import IS_INTERPRETED, decode, load_exponents, scales
from areno.kernels.jit import kernel, load_masked, program_id_64
from areno.kernels.paged.reference import PagedBatch
from areno.kernels.paged.rows import as_bytes
from areno.kernels.paged.triton_rows import store_codes

_FIRST_OWN_SPLIT_LEN = tl.constexpr(SPAN)  # positions in the first part of a row without a prefix group
_ONES = tl.constexpr(64)  # rows of ones: a product with them sums the columns of a tile
_JOIN_HEADS = tl.constexpr(8)  # heads that one program of the second kernel combines


def paged_attention(
    q_BHC: Tensor,
    k_BKC: Tensor,
    v_BKC: Tensor,
    kv_blocks: Tensor,
    batch: PagedBatch,
    window: int | None,
    exponents: Tensor | None,
    sinks_H: Tensor | None,
) -> Tensor:
    q_BHC, k_BKC, v_BKC = (with_contiguous_heads(x) for x in (q_BHC, k_BKC, v_BKC))
    n_rows, n_heads, dim = q_BHC.shape
    k_blocks, v_blocks = as_bytes(kv_blocks)
    k_exponents, v_exponents = (None, None) if exponents is None else exponents
    _, block_size, n_kv_heads, _ = k_blocks.shape
    shared = n_heads // n_kv_heads
    n_groups, group_size, own_splits, shared_splits = batch.group_and_split_counts()
    n_parts = own_splits + shared_splits
    constants = {"DIM": dim, "PADDED_DIM": max(16, triton.next_power_of_2(dim))}
    if batch.pdl:
        constants |= jit.pdl_options(q_BHC.device)
    out_BHC = q_BHC.new_empty((n_rows, n_heads, dim))
    # For each row, head and part: `sums` are weighted sums of values, `stats` largest scores and sums of weights.
    sums = q_BHC.new_empty((n_rows, n_heads, n_parts, dim), dtype=torch.float32)
    stats = q_BHC.new_empty((2, n_rows, n_heads, n_parts), dtype=torch.float32)
    rate = dim**-0.5 * LOG2_E
    where = (batch.table_TW, batch.slots_B, batch.lengths_B, batch.shared_lens_B, batch.split_lens)
    strides = (q_BHC.stride(0), k_BKC.stride(0), v_BKC.stride(0), batch.table_TW.stride(0))
    counts = (n_rows * n_heads * n_parts, n_groups * shared_splits, own_splits, shared_splits)
    _split_kernel[(n_kv_heads, n_groups * shared_splits + n_rows * own_splits)](
        q_BHC,
        k_BKC,
        v_BKC,
        k_blocks,
        v_blocks,
        k_exponents,
        v_exponents,
        *where,
        batch.prefix_groups_GR,
        sums,
        stats,
        rate,
        *strides,
        *counts,
        **constants,
        HEADS_PER_KEY=shared,
        GROUP_SIZE=group_size,
        OWN_ROWS=max(16, triton.next_power_of_2(shared)),  # tl.dot needs 16 rows
        GROUP_ROWS=max(16, triton.next_power_of_2(shared * group_size)),
        STRIDE=k_blocks.stride(1),
        BLOCK_SIZE=block_size,
        HAS_GROUPS=n_groups > 0,
        WINDOW=window,
        num_warps=4,
        num_stages=2,
    )
    _combine_splits_kernel[(n_rows, triton.cdiv(n_heads, _JOIN_HEADS.value))](
        sums,
        stats,
        batch.lengths_B,
        batch.shared_lens_B,
        batch.split_lens,
        sinks_H,
        out_BHC,
        rate,
        n_rows * n_heads * n_parts,
        n_heads,
        n_parts,
        **constants,
        num_warps=4,
    )
    return out_BHC


@triton.jit
def _first_split_end(length, shared, first_group_split_len):
    """Return the number of positions in the first part of a row."""
    return tl.where(shared > 0, tl.minimum(shared, first_group_split_len), tl.minimum(length, _FIRST_OWN_SPLIT_LEN))


@kernel(do_not_specialize=["n_cells", "n_group_splits", "own_splits", "shared_splits"])
def _split_kernel(
    q_ptr,
    new_k_ptr,
    new_v_ptr,
    k_ptr,
    v_ptr,
    k_exponents_ptr,
    v_exponents_ptr,
    table_ptr,
    slots_ptr,
    lengths_ptr,
    shared_ptr,
    split_lens_ptr,
    groups_ptr,
    sums_ptr,
    stats_ptr,
    rate,
    q_stride,
    new_k_stride,
    new_v_stride,
    table_stride,
    n_cells,
    n_group_splits,
    own_splits,
    shared_splits,
    HEADS_PER_KEY: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """In each program, compute one part for one key head. A shared part is computed for all rows of its group."""
    if PDL:
        jit.launch_dependents()
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    n_heads, n_parts = tl.num_programs(0) * HEADS_PER_KEY, own_splits + shared_splits
    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    if k_exponents_ptr is not None:
        k_exponents_ptr += kv_head * BLOCK_SIZE
        v_exponents_ptr += kv_head * BLOCK_SIZE
    given = q_ptr, sums_ptr, stats_ptr, rate, q_stride, n_heads, n_parts, n_cells
    cache = k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr
    dim = tl.arange(0, PADDED_DIM)
    first_group_split_len = tl.load(split_lens_ptr + 1).to(tl.int32)
    if piece < n_group_splits:
        if HAS_GROUPS:
            group, split = piece // shared_splits, piece % shared_splits
            leader = tl.load(groups_ptr + group * GROUP_SIZE).to(tl.int64)
            if leader >= 0:
                shared = tl.load(shared_ptr + leader).to(tl.int32)
                n_first_spans = n_spans(tl.minimum(first_group_split_len, shared))
                span = tl.where(split == 0, 0, n_first_spans + split - 1)
                if span_start(span) < shared:
                    cell = tl.arange(0, GROUP_ROWS)
                    member = cell // HEADS_PER_KEY
                    row = tl.load(groups_ptr + group * GROUP_SIZE + member, mask=member < GROUP_SIZE, other=-1).to(
                        tl.int64
                    )
                    table_row = table_ptr + tl.load(slots_ptr + leader).to(tl.int64) * table_stride
                    row_length = tl.load(lengths_ptr + row, mask=row >= 0, other=2**31 - 1).to(tl.int32)
                    if PDL:
                        jit.wait_for_previous()
                    cells = row, kv_head * HEADS_PER_KEY + cell % HEADS_PER_KEY, row >= 0, row_length
                    end = tl.minimum(tl.where(split == 0, first_group_split_len, span_start(span + 1)), shared)
                    part = table_row, span, end, split
                    _attend_spans(given, cache, cells, part, GROUP_ROWS, STRIDE, DIM, PADDED_DIM, BLOCK_SIZE, WINDOW)
    else:
        piece -= n_group_splits
        row = (piece // own_splits).to(tl.int64)
        split = piece % own_splits
        length = tl.load(lengths_ptr + row).to(tl.int32)
        shared = tl.load(shared_ptr + row).to(tl.int32)
        n_first_spans = n_spans(_first_split_end(length, shared, first_group_split_len))
        is_first = (split == 0) & (shared == 0)
        span = tl.where(shared > 0, n_spans(shared) + split, tl.where(is_first, 0, n_first_spans + split - 1))
        end = tl.minimum(tl.where(is_first, _FIRST_OWN_SPLIT_LEN, span_start(span + 1)), length)
        if span_start(span) < length:
            table_row = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
            if PDL:
                jit.wait_for_previous()
            if end == length:
                # Write the new token's key and value to the cache. All threads wait, since they read them there.
                inside = dim < DIM
                new_k = load_masked(new_k_ptr + row * new_k_stride + kv_head * DIM + dim, inside)
                new_v = load_masked(new_v_ptr + row * new_v_stride + kv_head * DIM + dim, inside)
                block = tl.load(table_row + (length - 1) // BLOCK_SIZE).to(tl.int64)
                place = block * (BLOCK_SIZE * STRIDE) + ((length - 1) % BLOCK_SIZE) * STRIDE
                if k_exponents_ptr is not None:
                    exponent_place = block * (tl.num_programs(0) * BLOCK_SIZE) + (length - 1) % BLOCK_SIZE
                    store_codes(k_ptr + place, k_exponents_ptr + exponent_place, new_k, dim, inside)
                    store_codes(v_ptr + place, v_exponents_ptr + exponent_place, new_v, dim, inside)
                else:
                    tl.store(k_ptr + place + dim, new_k, mask=inside)
                    tl.store(v_ptr + place + dim, new_v, mask=inside)
                tl.debug_barrier()
            cell = tl.arange(0, OWN_ROWS)
            rows, lengths = row + tl.zeros([OWN_ROWS], tl.int64), length + tl.zeros([OWN_ROWS], tl.int32)
            cells = rows, kv_head * HEADS_PER_KEY + cell, cell < HEADS_PER_KEY, lengths
            part = table_row, span, end, tl.where(is_first, 0, span - n_first_spans + 1)
            _attend_spans(given, cache, cells, part, OWN_ROWS, STRIDE, DIM, PADDED_DIM, BLOCK_SIZE, WINDOW)


@triton.jit
def _attend_spans(
    given,
    cache,
    cells,
    part,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write the partial result over the spans from index `span` to position `end`, for ROWS (row, head) pairs.

    Keys are the rows of the products and queries their columns: a Hopper GPU then multiplies the tiles directly from
    shared memory, and its registers hold little more than the sums.
    """
    q_ptr, sums_ptr, stats_ptr, rate, q_stride, n_heads, n_parts, n_cells = given
    k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr = cache
    row, head, real, row_length = cells
    table_row, span, end, index_of_part = part
    dim = tl.arange(0, PADDED_DIM)
    mask = (dim < DIM)[:, None] & real[None, :]
    q = load_masked(q_ptr + (row * q_stride + head * DIM)[None, :] + dim[:, None], mask)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([PADDED_DIM, ROWS], tl.float32)
    for index in range(span, n_spans(end)):
        span_best = tl.full([ROWS], float("-inf"), tl.float32)
        span_total = tl.zeros([_ONES, ROWS], tl.float32)
        span_acc = tl.zeros([PADDED_DIM, ROWS], tl.float32)
        begin = span_start(index)
        if WINDOW is not None:
            begin = tl.maximum(begin, (tl.min(row_length, axis=0) - WINDOW) // TILE * TILE)
        for tile in range(begin, tl.minimum(span_start(index + 1), end), TILE):
            k, v = _load_tile(k_ptr, v_ptr, table_row, tile, end, STRIDE, DIM, PADDED_DIM, BLOCK_SIZE)
            position = tile + tl.arange(0, TILE)
            if k_exponents_ptr is not None:
                if BLOCK_SIZE % TILE.value == 0:
                    block = tl.load(table_row + tile // BLOCK_SIZE).to(tl.int64)
                else:
                    block = load_masked(table_row + position // BLOCK_SIZE, position < end).to(tl.int64)
                place = block * (tl.num_programs(0) * BLOCK_SIZE) + position % BLOCK_SIZE
                k = _dequantize(k, load_exponents(k_exponents_ptr, place, position < end), q.dtype)
                v = _dequantize(v, load_exponents(v_exponents_ptr, place, position < end), q.dtype)
            visible = (position < end)[:, None]
            if WINDOW is not None:
                visible &= position[:, None] >= (row_length - WINDOW)[None, :]
            scores = tl.where(visible, tl.dot(k, q, input_precision="ieee"), float("-inf"))
            new_best = tl.maximum(span_best, tl.max(scores, axis=0))
            shift, decay = rescale_factors(span_best, new_best, rate)
            weights = tl.exp2(tl.fma(scores, rate, shift[None, :])).to(v.dtype)
            span_acc = tl.dot(tl.trans(v), weights, acc=span_acc * decay[None, :], input_precision="ieee")
            ones = tl.full([_ONES, TILE], 1.0, v.dtype)
            span_total = tl.dot(ones, weights, acc=span_total * decay[None, :], input_precision="ieee")
            span_best = new_best
        best, total, decay, weight = join_spans(best, total, span_best, tl.max(span_total, axis=0), rate)
        acc = tl.fma(acc, decay[None, :], span_acc * weight[None, :])
    cell = (row * n_heads + head) * n_parts + index_of_part
    tl.store(sums_ptr + cell[None, :] * DIM + dim[:, None], acc, mask=mask)
    tl.store(stats_ptr + cell, best, mask=real)
    tl.store(stats_ptr + n_cells + cell, total, mask=real)


@triton.jit
def _dequantize(codes, exponent, dtype: tl.constexpr):
    x = (decode(codes, tl.float32) * scales(exponent)[:, None]).to(dtype)
    if IS_INTERPRETED or tl.float32 == dtype:
        return x
    else:
        # Triton follows x back to its loads. Of bytes, it adds a product's terms in another order than training, which
        # loads 16 bits (but not with Hopper's instructions). It does not look behind an instruction with effects.
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def _load_tile(
    k_ptr,
    v_ptr,
    table_row,
    first,
    end,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Load the keys and values of TILE positions from `first`, a multiple of TILE, (TILE, PADDED_DIM) each.

    For positions from `end` on, the result is whatever the cache holds there, or 0.
    """
    offset = tl.arange(0, TILE)
    dim = tl.arange(0, PADDED_DIM)
    if BLOCK_SIZE % TILE.value == 0:  # the tile lies in one block, which may be read to its end
        block = tl.load(table_row + first // BLOCK_SIZE).to(tl.int64)
        start = block * (BLOCK_SIZE * STRIDE) + first % BLOCK_SIZE * STRIDE
        k_ptr += start
        v_ptr += start
        place = offset[:, None] * STRIDE + dim[None, :]
        if DIM == PADDED_DIM:
            k = tl.load(k_ptr + place)
            v = tl.load(v_ptr + place)
        else:
            real = (dim < DIM)[None, :]
            k = load_masked(k_ptr + place, real)
            v = load_masked(v_ptr + place, real)
    else:
        position = first + offset
        inside = position < end
        block = load_masked(table_row + position // BLOCK_SIZE, inside).to(tl.int64)
        place = (block * (BLOCK_SIZE * STRIDE) + position % BLOCK_SIZE * STRIDE)[:, None] + dim[None, :]
        real = inside[:, None] & (dim < DIM)[None, :]
        k = load_masked(k_ptr + place, real)
        v = load_masked(v_ptr + place, real)
    return k, v


@kernel(do_not_specialize=["n_cells", "n_parts"])
def _combine_splits_kernel(
    sums_ptr,
    stats_ptr,
    lengths_ptr,
    shared_ptr,
    split_lens_ptr,
    sinks_ptr,
    out_ptr,
    rate,
    n_cells,
    n_heads,
    n_parts,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PDL: tl.constexpr = False,
):
    row = program_id_64(0)
    head = tl.program_id(1) * _JOIN_HEADS + tl.arange(0, _JOIN_HEADS)
    dim = tl.arange(0, PADDED_DIM)
    real = head < n_heads
    head += row * n_heads
    length = tl.load(lengths_ptr + row).to(tl.int32)
    shared = tl.load(shared_ptr + row).to(tl.int32)
    n_joined = 1 + n_spans(length) - n_spans(_first_split_end(length, shared, tl.load(split_lens_ptr + 1).to(tl.int32)))
    mask = real[:, None] & (dim < DIM)[None, :]
    best, total, acc = empty_softmax(_JOIN_HEADS, PADDED_DIM)
    if PDL:
        jit.launch_dependents()
        jit.wait_for_previous()
    for index in range(n_joined):
        cell = head * n_parts + index
        part_acc = load_masked(sums_ptr + cell[:, None] * DIM + dim[None, :], mask)
        part_best = load_masked(stats_ptr + cell, real)
        part_total = tl.load(stats_ptr + n_cells + cell, mask=real, other=1.0)
        best, total, decay, weight = join_spans(best, total, part_best, part_total, rate)
        acc = tl.fma(acc, decay[:, None], part_acc * weight[:, None])
    total = total_with_sink(sinks_ptr, head - row * n_heads, real, best, total, rate)
    place = out_ptr + head[:, None] * DIM + dim[None, :]
    tl.store(place, tl.div_rn(acc, total[:, None]), mask=mask)
