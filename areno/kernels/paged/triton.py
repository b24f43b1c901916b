# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged decode attention as Triton kernels (flash-decoding; running softmax: arXiv 1805.02867).

A row has positions of its own, and positions that it shares with the other rows of its prefix group. Both kinds of
positions are cut into splits that run in parallel. A second kernel combines the partial results of each row. A program
for a split of a group computes all rows of the group. Their queries for one key head are the rows of one matrix
product, so shared blocks are read once for the group (the idea of cascade attention, arXiv 2402.05099).

The grid depends on shapes alone and programs read lengths on the device, so a CUDA graph can capture the launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.fixed_order.triton import empty_softmax, total_with_sink, with_contiguous_heads
from areno.kernels.jit import kernel, load_masked, program_id_64
from areno.kernels.paged.gluon_splits import ROW_POINTERS, SPECIALISATION, compute_splits
from areno.kernels.paged.reference import PagedBatch
from areno.kernels.paged.rows import as_bytes
from areno.kernels.paged.triton_attend import TILE, attend
from areno.kernels.paged.triton_fixed_order import paged_attention
from areno.kernels.paged.triton_rows import store_codes

_FP8_STAGES = 2  # of loads from an FP8 cache; with 3 or 4, kernels take 3 % longer on an H200


def decode_attention(
    q_BHC: Tensor,
    k_BKC: Tensor,
    v_BKC: Tensor,
    kv_blocks: Tensor,
    batch: PagedBatch,
    window: int | None = None,
    exponents: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    if batch.fixed_order:
        return paged_attention(q_BHC, k_BKC, v_BKC, kv_blocks, batch, window, exponents, sinks_H)
    n_rows, n_heads, head_dim = q_BHC.shape
    n_kv_heads, block_size = kv_blocks.shape[3], kv_blocks.shape[2]
    q_BHC, k_BKC, v_BKC = (with_contiguous_heads(x) for x in (q_BHC, k_BKC, v_BKC))
    k_blocks, v_blocks = as_bytes(kv_blocks)
    k_exponents, v_exponents = (None, None) if exponents is None else exponents
    assert k_blocks.is_contiguous()
    n_shared_heads = n_heads // n_kv_heads
    # The fastest on an H200. With 8 query heads for each key head, two warps spill many registers and take 47 us, and
    # four warps take 44 us. With 5 query heads, two warps take 43 us, and four warps take 54 us.
    n_warps, n_stages = (1, 2) if n_shared_heads <= 2 else (2, 3) if n_shared_heads < 8 else (4, 3)
    if exponents is not None:
        n_stages = _FP8_STAGES
    n_groups, group_size, own_splits, shared_splits = batch.group_and_split_counts()
    n_parts = own_splits + shared_splits
    combines = n_parts > 1 or sinks_H is not None
    out = q_BHC.new_empty((n_rows, n_heads, head_dim))
    partial = q_BHC.new_empty((n_rows, n_heads, n_parts, head_dim), dtype=torch.float32) if combines else out
    log_sum = q_BHC.new_empty((n_rows, n_heads, n_parts), dtype=torch.float32)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    options = jit.pdl_options(q_BHC.device) if batch.pdl else {}
    grid = n_kv_heads, n_groups * shared_splits + n_rows * own_splits
    arguments = (
        q_BHC,
        k_BKC,
        v_BKC,
        k_blocks,
        v_blocks,
        batch.table_TW,
        batch.slots_B,
        batch.lengths_B,
        batch.shared_lens_B,
        batch.split_lens,
        batch.prefix_groups_GR,
        partial,
        log_sum,
        head_dim**-0.5 * 1.4426950408889634,  # log2(e): the kernels use powers of 2
        q_BHC.stride(0),
        k_BKC.stride(0),
        v_BKC.stride(0),
        k_blocks.stride(1),
        batch.table_TW.stride(0),
        n_groups * shared_splits,
        own_splits,
        shared_splits,
    )
    constants = {
        "HEADS_PER_KEY": n_shared_heads,
        "GROUP_SIZE": group_size,
        "BLOCK_SIZE": block_size,
        "ONE_PART": not combines,
        **options,
    }
    if window is not None or not compute_splits(
        grid, q_BHC, kv_blocks, exponents, arguments, constants, batch.reads_early
    ):
        _split_kernel[grid](
            *arguments,
            **constants,
            OWN_ROWS=max(16, triton.next_power_of_2(n_shared_heads)),  # tl.dot needs 16 rows
            GROUP_ROWS=max(16, triton.next_power_of_2(n_shared_heads * group_size)),
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            HAS_GROUPS=n_groups > 0,
            WINDOW=window,
            k_exponents_ptr=k_exponents,
            v_exponents_ptr=v_exponents,
            num_warps=n_warps,
            num_stages=n_stages,
        )
    if combines:
        join_heads = 4 if n_rows <= 64 else 8  # that a program combines, a power of two; the fastest on an H200
        _combine_splits_kernel[(n_rows, triton.cdiv(n_heads, join_heads))](
            partial,
            log_sum,
            batch.lengths_B,
            batch.shared_lens_B,
            batch.split_lens,
            sinks_H,
            out,
            n_heads,
            n_parts,
            own_splits,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            MAX_PARTS=triton.next_power_of_2(n_parts),
            JOIN_HEADS=join_heads,
            num_warps=4,
            **options,
        )
    return out


@kernel(**SPECIALISATION)
def _split_kernel(
    q_ptr,
    new_k_ptr,
    new_v_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    slots_ptr,
    lengths_ptr,
    shared_ptr,
    split_lens_ptr,
    groups_ptr,
    partial_ptr,
    log_sum_ptr,
    scale,
    q_stride,
    new_k_stride,
    new_v_stride,
    stride,
    table_stride,
    n_group_splits,
    own_splits,
    shared_splits,
    HEADS_PER_KEY: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    ONE_PART: tl.constexpr,
    WINDOW: tl.constexpr,
    k_exponents_ptr,
    v_exponents_ptr,
    PDL: tl.constexpr = False,
):
    """Compute the partial result of one split for one key head in each program. An empty split writes nothing.

    With PDL, the first split of every row calls `wait_for_previous`.
    """
    if PDL:
        jit.launch_dependents()
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    n_heads = tl.num_programs(0) * HEADS_PER_KEY
    n_parts = own_splits + shared_splits
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    if k_exponents_ptr is not None:
        k_exponents_ptr += kv_head * BLOCK_SIZE
        v_exponents_ptr += kv_head * BLOCK_SIZE
    exponents = k_exponents_ptr, v_exponents_ptr
    dim = tl.arange(0, PADDED_DIM)
    real_dim = dim < HEAD_DIM

    if piece < n_group_splits:
        if HAS_GROUPS:
            group = piece // shared_splits
            split = piece % shared_splits
            leader = tl.load(groups_ptr + group * GROUP_SIZE).to(tl.int64)
            if leader >= 0:
                length = tl.load(shared_ptr + leader).to(tl.int32)
                span = tl.load(split_lens_ptr + 1).to(tl.int32)
                start = split * span
                if start < length:
                    cell = tl.arange(0, GROUP_ROWS)
                    member = cell // HEADS_PER_KEY
                    row = tl.load(groups_ptr + group * GROUP_SIZE + member, mask=member < GROUP_SIZE, other=-1).to(
                        tl.int64
                    )
                    head = kv_head * HEADS_PER_KEY + cell % HEADS_PER_KEY
                    table_row = table_ptr + tl.load(slots_ptr + leader).to(tl.int64) * table_stride
                    real = (row >= 0)[:, None] & real_dim[None, :]
                    best, total, acc = empty_softmax(GROUP_ROWS, PADDED_DIM)
                    end = tl.minimum(start + span, length)
                    least = start
                    if WINDOW is not None:
                        row_length = tl.load(lengths_ptr + row, mask=row >= 0, other=2**31 - 1).to(tl.int32)
                        least = row_length - WINDOW
                        start = tl.maximum(start, tl.min(least, axis=0) // TILE * TILE)
                    place = q_ptr + (row * q_stride + head * HEAD_DIM)[:, None] + dim[None, :]
                    if PDL:
                        jit.wait_for_previous()
                    q = load_masked(place, real)
                    softmax, positions = (best, total, acc), (start, end, least)
                    cache = k_ptr, v_ptr, table_row, stride
                    best, total, acc = attend(
                        q, softmax, positions, cache, exponents, scale, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW
                    )
                    if WINDOW is not None:  # rows that attend to none of these positions get log_sum -inf
                        total = tl.where(best == float("-inf"), 1.0, total)
                    part = (row * n_heads + head) * n_parts + own_splits + split
                    place = partial_ptr + part[:, None] * HEAD_DIM + dim[None, :]
                    tl.store(place, acc / total[:, None], mask=real)
                    tl.store(log_sum_ptr + part, best + tl.log2(total), mask=row >= 0)
    else:
        piece -= n_group_splits
        row = (piece // own_splits).to(tl.int64)
        split = piece % own_splits
        last = tl.load(lengths_ptr + row).to(tl.int32) - 1
        span = tl.load(split_lens_ptr).to(tl.int32)
        start = tl.load(shared_ptr + row).to(tl.int32) + split * span
        if (start < last) | (split == 0):
            table_row = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
            cell = tl.arange(0, OWN_ROWS)
            real = (cell < HEADS_PER_KEY)[:, None] & real_dim[None, :]
            head = kv_head * HEADS_PER_KEY + cell
            if PDL:
                jit.wait_for_previous()
            q = load_masked(q_ptr + row * q_stride + head[:, None] * HEAD_DIM + dim[None, :], real)
            best, total, acc = empty_softmax(OWN_ROWS, PADDED_DIM)
            if split == 0:
                # Write the new token's key and value to the cache, and begin the softmax with them.
                new_k = load_masked(new_k_ptr + row * new_k_stride + kv_head * HEAD_DIM + dim, real_dim)
                new_v = load_masked(new_v_ptr + row * new_v_stride + kv_head * HEAD_DIM + dim, real_dim)
                block = tl.load(table_row + last // BLOCK_SIZE).to(tl.int64)
                place = block * (BLOCK_SIZE * stride) + (last % BLOCK_SIZE) * stride
                if k_exponents_ptr is not None:
                    exponent_place = block * (tl.num_programs(0) * BLOCK_SIZE) + last % BLOCK_SIZE
                    store_codes(k_ptr + place, k_exponents_ptr + exponent_place, new_k, dim, real_dim)
                    store_codes(v_ptr + place, v_exponents_ptr + exponent_place, new_v, dim, real_dim)
                else:
                    tl.store(k_ptr + place + dim, new_k, mask=real_dim)
                    tl.store(v_ptr + place + dim, new_v, mask=real_dim)
                best = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], axis=1) * scale
                total = tl.full([OWN_ROWS], 1.0, tl.float32)
                acc += new_v.to(tl.float32)[None, :]
            end = tl.minimum(start + span, last)
            least = start
            if WINDOW is not None:
                least = last + 1 - WINDOW + tl.zeros([OWN_ROWS], tl.int32)
                start = tl.maximum(start, (last + 1 - WINDOW) // TILE * TILE)
            softmax, positions = (best, total, acc), (start, end, least)
            cache = k_ptr, v_ptr, table_row, stride
            best, total, acc = attend(
                q, softmax, positions, cache, exponents, scale, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WINDOW
            )
            if WINDOW is not None:
                total = tl.where(best == float("-inf"), 1.0, total)
            part = (row * n_heads + head) * n_parts + split
            cells = partial_ptr + part[:, None] * HEAD_DIM + dim[None, :]
            tl.store(cells, acc / total[:, None], mask=real)
            if not ONE_PART:
                tl.store(log_sum_ptr + part, best + tl.log2(total), mask=cell < HEADS_PER_KEY)


@kernel(do_not_specialize=["n_parts", "own_splits"], do_not_specialize_on_alignment=ROW_POINTERS)
def _combine_splits_kernel(
    partial_ptr,
    log_sum_ptr,
    lengths_ptr,
    shared_ptr,
    split_lens_ptr,
    sinks_ptr,
    out_ptr,
    n_heads,
    n_parts,
    own_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    JOIN_HEADS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    row = program_id_64(0)
    head = tl.program_id(1) * JOIN_HEADS + tl.arange(0, JOIN_HEADS)
    dim = tl.arange(0, PADDED_DIM)
    real = head < n_heads
    head += row * n_heads
    shared = tl.load(shared_ptr + row).to(tl.int32)
    own = tl.load(lengths_ptr + row).to(tl.int32) - 1 - shared
    own_split_len = tl.load(split_lens_ptr).to(tl.int32)
    shared_split_len = tl.load(split_lens_ptr + 1).to(tl.int32)
    best, total, acc = empty_softmax(JOIN_HEADS, PADDED_DIM)
    if PDL:
        jit.launch_dependents()
        jit.wait_for_previous()
    for part in tl.static_range(MAX_PARTS):
        exists = real
        if part > 0:  # part 0 always exists: it has the new token, so `best` is finite afterwards
            left = tl.where(
                part < own_splits, own - part * own_split_len, shared - (part - own_splits) * shared_split_len
            )
            left = tl.where(part < n_parts, left, 0)
            exists = real & (tl.zeros([JOIN_HEADS], tl.int32) + left > 0)
        cell = head * n_parts + part
        log_sum = tl.load(log_sum_ptr + cell, mask=exists, other=float("-inf"))
        place = partial_ptr + cell[:, None] * HEAD_DIM + dim[None, :]
        partial = load_masked(place, exists[:, None] & (dim < HEAD_DIM)[None, :])
        new_best = tl.where(real, tl.maximum(best, log_sum), 0.0)
        weight = tl.exp2(log_sum - new_best)
        decay = tl.exp2(best - new_best)
        acc = acc * decay[:, None] + weight[:, None] * partial
        total = total * decay + weight
        best = new_best
    total = total_with_sink(sinks_ptr, head - row * n_heads, real, best, total, 1.0)
    place = out_ptr + head[:, None] * HEAD_DIM + dim[None, :]
    mask = real[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(place, acc / total[:, None], mask=mask)
