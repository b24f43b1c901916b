# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The Triton form: one kernel for packed rows, and two for a decode step, from the same functions on tiles.

What fixes the bits of a result: the tiles of TILE keys are taken in order within a span, each span from scratch, and
the spans are joined in order. How many queries share a program is free, since a matrix unit computes each row alone.
Sums over keys are matrix products, too, as the order of `tl.sum` depends on the layout of a tile. Multiply-adds are
written out, because a compiler may fuse them in one kernel and not in another.

Shape letters as in `areno/kernels/attention` and `areno/kernels/paged`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.paged.reference import PagedBatch
from areno.kernels.spans.reference import SPAN

_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
_SPAN = tl.constexpr(SPAN)
_TILE = tl.constexpr(64)  # keys taken together, a power of two that divides a span
_ONES = tl.constexpr(16)  # columns of a product that sums
_QUERIES, _QUERY_WARPS = 128, 8  # of a program for packed rows
_JOIN_HEADS = tl.constexpr(8)  # heads that a program of the join takes


def packed_attention(
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `areno.kernels.spans.packed_attention`."""
    q_NHC, k_MKC, v_MKC = (heads_together(x) for x in (q_NHC, k_MKC, v_MKC))
    n_tokens, n_heads, dim = q_NHC.shape
    out_NHC = q_NHC.new_empty((n_tokens, n_heads, dim))
    log_sum_HN = q_NHC.new_empty((n_heads, n_tokens), dtype=torch.float32)
    if n_tokens:
        _packed_kernel[(triton.cdiv(max_q, _QUERIES), n_heads, len(cu_seqlens_q) - 1)](
            q_NHC,
            k_MKC,
            v_MKC,
            cu_seqlens_q,
            cu_seqlens_k,
            out_NHC,
            log_sum_HN,
            dim**-0.5 * _LOG2_E,
            q_NHC.stride(0),
            k_MKC.stride(0),
            v_MKC.stride(0),
            n_tokens,
            GROUP=n_heads // k_MKC.shape[1],
            QUERIES=_QUERIES,
            DIM=dim,
            PADDED_DIM=max(16, triton.next_power_of_2(dim)),
            WINDOW=window,
            num_warps=_QUERY_WARPS,
            num_stages=2,
        )
    return out_NHC, log_sum_HN


def paged_attention(
    q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, kv_blocks: Tensor, batch: PagedBatch, window: int | None = None
) -> Tensor:
    """As `areno.kernels.paged.decode_attention`, for an exact batch."""
    q_BHC, k_BKC, v_BKC = (heads_together(x) for x in (q_BHC, k_BKC, v_BKC))
    n_rows, n_heads, dim = q_BHC.shape
    k_blocks, v_blocks = kv_blocks[0], kv_blocks[1]
    _, block_size, n_kv_heads, _ = k_blocks.shape
    shared = n_heads // n_kv_heads
    own_splits, shared_splits = batch.splits
    n_groups, group_size = (0, 1) if batch.prefix_groups_GR is None else batch.prefix_groups_GR.shape
    if n_groups == 0:
        shared_splits = 0
    n_parts = own_splits + shared_splits
    padded_dim = max(16, triton.next_power_of_2(dim))
    out_BHC = q_BHC.new_empty((n_rows, n_heads, dim))
    # Of each row and head, by span: the sum of weighted values; the largest score; the sum of weights.
    sums = q_BHC.new_empty((n_rows, n_heads, n_parts, dim), dtype=torch.float32)
    stats = q_BHC.new_empty((2, n_rows, n_heads, n_parts), dtype=torch.float32)
    rate = dim**-0.5 * _LOG2_E
    _span_kernel[(n_kv_heads, n_groups * shared_splits + n_rows * own_splits)](
        q_BHC,
        k_BKC,
        v_BKC,
        k_blocks,
        v_blocks,
        batch.table_TW,
        batch.slots_B,
        batch.lengths_B,
        batch.shared_lens_B,
        batch.prefix_groups_GR,
        sums,
        stats,
        rate,
        q_BHC.stride(0),
        k_BKC.stride(0),
        v_BKC.stride(0),
        k_blocks.stride(1),
        batch.table_TW.stride(0),
        n_rows * n_heads * n_parts,
        n_groups * shared_splits,
        own_splits,
        shared_splits,
        GROUP=shared,
        TEAM=group_size,
        OWN_ROWS=max(16, triton.next_power_of_2(shared)),  # tl.dot needs 16 rows
        TEAM_ROWS=max(16, triton.next_power_of_2(shared * group_size)),
        DIM=dim,
        PADDED_DIM=padded_dim,
        BLOCK=block_size,
        HAS_TEAMS=n_groups > 0,
        WINDOW=window,
        num_warps=2,
        num_stages=2,
    )
    _join_kernel[(n_rows, triton.cdiv(n_heads, _JOIN_HEADS.value))](
        sums,
        stats,
        batch.lengths_B,
        out_BHC,
        rate,
        n_rows * n_heads * n_parts,
        n_heads,
        n_parts,
        DIM=dim,
        PADDED_DIM=padded_dim,
        num_warps=4,
    )
    return out_BHC


def heads_together(x: Tensor) -> Tensor:
    """x itself where each row's heads lie side by side, else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def _take(q, k, v, visible, best, total, acc, rate):
    """Take a tile of keys into a running softmax. visible: which keys each query sees, (queries, TILE).

    best: the largest score so far, -inf before any. total: the sum of weights, once in each of its _ONES columns.
    """
    scores = tl.dot(q, k, input_precision="ieee")
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    origin = tl.where(new_best == float("-inf"), 0.0, new_best)
    shift = 0.0 - origin * rate
    weights = tl.exp2(tl.fma(scores, rate, shift[:, None])).to(v.dtype)
    decay = tl.exp2((best - origin) * rate)[:, None]
    acc = tl.dot(weights, v, acc=acc * decay, input_precision="ieee")
    ones = tl.full([_TILE, _ONES], 1.0, tl.float32).to(v.dtype)
    total = tl.dot(weights, ones, acc=total * decay, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def _join(best, total, acc, span_best, span_total, span_acc, rate):
    """Join the next span to those before it. (queries,), (queries,) and (queries, dim), of both."""
    new_best = tl.maximum(best, span_best)
    origin = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp2((best - origin) * rate)
    weight = tl.exp2((span_best - origin) * rate)
    acc = tl.fma(acc, decay[:, None], span_acc * weight[:, None])
    total = tl.fma(total, decay, span_total * weight)
    return new_best, total, acc


@triton.jit
def _packed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_q_ptr,
    starts_k_ptr,
    out_ptr,
    log_sum_ptr,
    rate,
    q_stride,
    k_stride,
    v_stride,
    n_tokens,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program for QUERIES queries of a row and one head. Those with the most keys come first."""
    head, row = tl.program_id(1), tl.program_id(2)
    start_q, start_k = tl.load(starts_q_ptr + row).to(tl.int64), tl.load(starts_k_ptr + row).to(tl.int64)
    n_q = (tl.load(starts_q_ptr + row + 1) - start_q).to(tl.int32)
    n_k = (tl.load(starts_k_ptr + row + 1) - start_k).to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first < n_q:
        query = first + tl.arange(0, QUERIES)
        position = n_k - n_q + query
        dim = tl.arange(0, PADDED_DIM)
        real_dim = dim < DIM
        real = (query < n_q)[:, None] & real_dim[None, :]
        token = start_q + query
        q = tl.load(q_ptr + token[:, None] * q_stride + head * DIM + dim[None, :], mask=real, other=0.0)
        k_ptr += start_k * k_stride + head // GROUP * DIM
        v_ptr += start_k * v_stride + head // GROUP * DIM
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
        end = tl.minimum(n_k, n_k - n_q + first + QUERIES)
        begin = 0
        if WINDOW is not None:
            begin = tl.maximum(n_k - n_q + first + 1 - WINDOW, 0) // _SPAN * _SPAN
        for start in range(begin, end, _SPAN):
            span_best = tl.full([QUERIES], float("-inf"), tl.float32)
            span_total = tl.zeros([QUERIES, _ONES], tl.float32)
            span_acc = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
            for tile in range(start, tl.minimum(start + _SPAN, end), _TILE):
                key = tile + tl.arange(0, _TILE)
                inside = key < end
                at = key.to(tl.int64)
                mask = inside[None, :] & real_dim[:, None]
                k = tl.load(k_ptr + at[None, :] * k_stride + dim[:, None], mask=mask, other=0.0)
                mask = inside[:, None] & real_dim[None, :]
                v = tl.load(v_ptr + at[:, None] * v_stride + dim[None, :], mask=mask, other=0.0)
                visible = key[None, :] <= position[:, None]
                if WINDOW is not None:
                    visible &= key[None, :] > position[:, None] - WINDOW
                span_best, span_total, span_acc = _take(q, k, v, visible, span_best, span_total, span_acc, rate)
            best, total, acc = _join(best, total, acc, span_best, tl.max(span_total, axis=1), span_acc, rate)
        place = out_ptr + (token * tl.num_programs(1) + head)[:, None] * DIM + dim[None, :]
        tl.store(place, tl.div_rn(acc, total[:, None]).to(out_ptr.dtype.element_ty), mask=real)
        log_sum = tl.fma(best, rate, tl.log2(total)) * _LN_2
        tl.store(log_sum_ptr + head.to(tl.int64) * n_tokens + token, log_sum, mask=query < n_q)


@triton.jit(do_not_specialize=["n_cells", "n_team_pieces", "own_splits", "shared_splits"])
def _span_kernel(
    q_ptr,
    new_k_ptr,
    new_v_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    slots_ptr,
    lengths_ptr,
    shared_ptr,
    teams_ptr,
    sums_ptr,
    stats_ptr,
    rate,
    q_stride,
    new_k_stride,
    new_v_stride,
    stride,
    table_stride,
    n_cells,
    n_team_pieces,
    own_splits,
    shared_splits,
    GROUP: tl.constexpr,
    TEAM: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    TEAM_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TEAMS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program for each span and key head: of a team's shared positions, or of a row's own."""
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    n_heads, n_parts = tl.num_programs(0) * GROUP, own_splits + shared_splits
    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    dim = tl.arange(0, PADDED_DIM)
    if piece < n_team_pieces:
        if HAS_TEAMS:
            team, span = piece // shared_splits, piece % shared_splits
            leader = tl.load(teams_ptr + team * TEAM).to(tl.int64)
            if leader >= 0:
                length = tl.load(shared_ptr + leader).to(tl.int32)
                if span * _SPAN < length:
                    cell = tl.arange(0, TEAM_ROWS)
                    member = cell // GROUP
                    row = tl.load(teams_ptr + team * TEAM + member, mask=member < TEAM, other=-1).to(tl.int64)
                    table_row = table_ptr + tl.load(slots_ptr + leader).to(tl.int64) * table_stride
                    _attend_span(
                        q_ptr,
                        k_ptr,
                        v_ptr,
                        table_row,
                        sums_ptr,
                        stats_ptr,
                        rate,
                        row,
                        kv_head * GROUP + cell % GROUP,
                        row >= 0,
                        span,
                        length,
                        tl.load(lengths_ptr + row, mask=row >= 0, other=2**31 - 1).to(tl.int32),
                        q_stride,
                        stride,
                        n_heads,
                        n_parts,
                        n_cells,
                        TEAM_ROWS,
                        DIM,
                        PADDED_DIM,
                        BLOCK,
                        WINDOW,
                    )
    else:
        piece -= n_team_pieces
        row = (piece // own_splits).to(tl.int64)
        length = tl.load(lengths_ptr + row).to(tl.int32)
        span = tl.load(shared_ptr + row).to(tl.int32) // _SPAN + piece % own_splits
        if span * _SPAN < length:
            table_row = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
            if (span + 1) * _SPAN >= length:
                # The new token's key and value are not in the cache yet: put them there, for all of this program.
                inside = dim < DIM
                new_k = tl.load(new_k_ptr + row * new_k_stride + kv_head * DIM + dim, mask=inside, other=0.0)
                new_v = tl.load(new_v_ptr + row * new_v_stride + kv_head * DIM + dim, mask=inside, other=0.0)
                block = tl.load(table_row + (length - 1) // BLOCK).to(tl.int64)
                place = block * (BLOCK * stride) + ((length - 1) % BLOCK) * stride
                tl.store(k_ptr + place + dim, new_k, mask=inside)
                tl.store(v_ptr + place + dim, new_v, mask=inside)
                tl.debug_barrier()
            cell = tl.arange(0, OWN_ROWS)
            own_length = length + tl.zeros([OWN_ROWS], tl.int32)
            _attend_span(
                q_ptr, k_ptr, v_ptr, table_row, sums_ptr, stats_ptr, rate, row + tl.zeros([OWN_ROWS], tl.int64),
                kv_head * GROUP + cell, cell < GROUP, span, length, own_length, q_stride, stride, n_heads, n_parts,
                n_cells, OWN_ROWS, DIM, PADDED_DIM, BLOCK, WINDOW,
            )  # fmt: skip


@triton.jit
def _attend_span(
    q_ptr,
    k_ptr,
    v_ptr,
    table_row,
    sums_ptr,
    stats_ptr,
    rate,
    row,
    head,
    real,
    span,
    length,
    row_length,
    q_stride,
    stride,
    n_heads,
    n_parts,
    n_cells,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write what the positions of one span, up to `length`, give for ROWS pairs of a row and a head.

    row_length: of each of these rows, for a WINDOW.
    """
    dim = tl.arange(0, PADDED_DIM)
    real_dim = dim < DIM
    mask = real[:, None] & real_dim[None, :]
    q = tl.load(q_ptr + (row * q_stride + head * DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, _ONES], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    start = span * _SPAN
    begin = start
    if WINDOW is not None:
        begin = tl.maximum(start, (tl.min(row_length, axis=0) - WINDOW) // _TILE * _TILE)
    for tile in range(begin, tl.minimum(start + _SPAN, length), _TILE):
        position = tile + tl.arange(0, _TILE)
        inside = position < length
        block = tl.load(table_row + position // BLOCK, mask=inside, other=0).to(tl.int64)
        base = block * (BLOCK * stride) + (position % BLOCK) * stride
        k = tl.load(k_ptr + base[None, :] + dim[:, None], mask=inside[None, :] & real_dim[:, None], other=0.0)
        v = tl.load(v_ptr + base[:, None] + dim[None, :], mask=inside[:, None] & real_dim[None, :], other=0.0)
        visible = inside[None, :]
        if WINDOW is not None:
            visible &= position[None, :] >= (row_length - WINDOW)[:, None]
        best, total, acc = _take(q, k, v, visible, best, total, acc, rate)
    part = (row * n_heads + head) * n_parts + span
    tl.store(sums_ptr + part[:, None] * DIM + dim[None, :], acc, mask=mask)
    tl.store(stats_ptr + part, best, mask=real)
    tl.store(stats_ptr + n_cells + part, tl.max(total, axis=1), mask=real)


@triton.jit(do_not_specialize=["n_cells", "n_parts"])
def _join_kernel(
    sums_ptr,
    stats_ptr,
    lengths_ptr,
    out_ptr,
    rate,
    n_cells,
    n_heads,
    n_parts,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Join the spans of some heads of a row, the first one first."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * _JOIN_HEADS + tl.arange(0, _JOIN_HEADS)
    dim = tl.arange(0, PADDED_DIM)
    real = head < n_heads
    mask = real[:, None] & (dim < DIM)[None, :]
    head += row * n_heads
    length = tl.load(lengths_ptr + row).to(tl.int32)
    best = tl.full([_JOIN_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([_JOIN_HEADS], tl.float32)
    acc = tl.zeros([_JOIN_HEADS, PADDED_DIM], tl.float32)
    for span in range(tl.cdiv(length, _SPAN)):
        part = head * n_parts + span
        span_acc = tl.load(sums_ptr + part[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        span_best = tl.load(stats_ptr + part, mask=real, other=0.0)
        span_total = tl.load(stats_ptr + n_cells + part, mask=real, other=1.0)
        best, total, acc = _join(best, total, acc, span_best, span_total, span_acc, rate)
    place = out_ptr + head[:, None] * DIM + dim[None, :]
    tl.store(place, tl.div_rn(acc, total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
