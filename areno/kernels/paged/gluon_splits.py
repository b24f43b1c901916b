# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""The splits of paged decode attention on Hopper GPUs, as one kernel in Gluon (`kernels/jit.py`).

The kernel computes the same splits as `_split_kernel` of `triton.py`. Each program begins before the previous kernel
has ended. The program copies its first tiles of keys and values to shared memory at once, while the queries are still
computed. In a step that verifies drafts, the program copies nothing before the previous kernel has ended, because rows
read keys that this step writes. On an H200, rollouts of Qwen3-0.6B with 64 samples take 5 % less time than with
`_split_kernel`, with 256 samples 3 % less, and with 1,024 samples as long. Qwen3-4B without shared prompts takes as
long with both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.kernels import jit
from areno.kernels.jit import HAS_GLUON

if HAS_GLUON:
    from areno.kernels.jit import copy_tile, gl, gluon, mbarrier, mma_v2

# Positions of a tile, tiles in shared memory, and warps: the fastest on an H200. With tiles of 32 positions, a rollout
# of Qwen3-0.6B with 64 samples takes 2 % longer, and with 4 tiles in shared memory 2.5 % longer.
_TILE, _STAGES, _WARPS = 16, 3, 1
_QUERIES = 16  # of a split, as many as a matrix instruction has
_HEAD_DIMS = 64, 128
# The alignment of these depends on the number of rows, so kernels specialised on it would be compiled again.
ROW_POINTERS = ["slots_ptr", "lengths_ptr", "shared_ptr"]
# of `_gluon_split_kernel` and of `_split_kernel`
SPECIALISATION = {
    "do_not_specialize": ["n_group_splits", "own_splits", "shared_splits"],
    "do_not_specialize_on_alignment": ROW_POINTERS,
}


def compute_splits(
    grid: tuple[int, int],
    q_BHC: Tensor,
    kv_blocks: Tensor,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    reads_early: bool,
) -> bool:
    """Compute all splits if Gluon runs on the device and supports the sizes. Return whether it did.

    `arguments` are the positional arguments of `_split_kernel`.
    """
    head_dim = kv_blocks.shape[-1]
    is_supported = (
        constants["HEADS_PER_KEY"] * constants["GROUP_SIZE"] <= _QUERIES
        and head_dim in _HEAD_DIMS
        and constants["BLOCK_SIZE"] % _TILE == 0
        and q_BHC.dtype == kv_blocks.dtype
        and q_BHC.dtype in (torch.bfloat16, torch.float16)
    )
    if not is_supported or not jit.can_run_gluon(q_BHC.device, "_gluon_split_kernel"):
        return False
    return jit.launch_gluon(
        _gluon_split_kernel,
        grid,
        *(jit.tile_descriptor(blocks.flatten(0, 1).flatten(1), _TILE, head_dim) for blocks in kv_blocks),
        *arguments,
        **constants,
        QUERIES=_QUERIES,
        STAGES=_STAGES,
        READS_EARLY=reads_early,
        num_warps=_WARPS,
    )


if HAS_GLUON:

    @gluon.jit
    def _copy_tiles(
        k_desc, v_desc, arrived, ks, vs, table_row, position, column, exists, stage, BLOCK_SIZE: gl.constexpr
    ):
        """Begin to copy the tiles of keys and values at `position` to index `stage` of shared memory, if they exist."""
        block = gl.load(table_row + position // BLOCK_SIZE, mask=exists, other=0)
        at = block * BLOCK_SIZE + position % BLOCK_SIZE
        mbarrier.expect(arrived.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=exists)
        copy_tile(k_desc, [at, column], arrived.index(stage), ks.index(stage), pred=exists)
        copy_tile(v_desc, [at, column], arrived.index(stage), vs.index(stage), pred=exists)

    @gluon.jit(**SPECIALISATION)
    def _gluon_split_kernel(
        k_desc,
        v_desc,
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
        HEADS_PER_KEY: gl.constexpr,
        GROUP_SIZE: gl.constexpr,
        QUERIES: gl.constexpr,
        BLOCK_SIZE: gl.constexpr,
        STAGES: gl.constexpr,
        ONE_PART: gl.constexpr,
        READS_EARLY: gl.constexpr,
        num_warps: gl.constexpr,
        PDL: gl.constexpr = False,
    ):
        """Compute one split for one key head in each program, as `_split_kernel` does.

        The queries of a split are those of one row, or of the rows of a prefix group, padded to QUERIES. Shared memory
        holds STAGES tiles of keys and as many of values. Each pair of tiles has a barrier, which counts the bytes that
        have arrived.
        """
        if PDL:
            jit.launch_dependents()
        TILE: gl.constexpr = k_desc.block_type.shape[0]
        HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
        scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[1, num_warps], instr_shape=[16, 8]
        )
        left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=2)
        right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=scores_layout, k_width=2)
        of_query: gl.constexpr = gl.SliceLayout(1, scores_layout)
        # 16 bytes of a query for each thread
        loads: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [num_warps, 1], [1, 0])
        ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, HEAD_DIM], k_desc.layout)
        vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, HEAD_DIM], v_desc.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for number in gl.static_range(STAGES):
            mbarrier.init(arrived.index(number), count=1)

        kv_head, piece = gl.program_id(0), gl.program_id(1)
        column = kv_head * HEAD_DIM
        n_heads, n_parts = gl.num_programs(0) * HEADS_PER_KEY, own_splits + shared_splits
        is_group = piece < n_group_splits
        own_piece = piece - n_group_splits
        first_row = (own_piece // own_splits).to(gl.int64)
        split = own_piece % own_splits
        part = split
        query = gl.arange(0, QUERIES, of_query)
        member = query // HEADS_PER_KEY
        if groups_ptr is not None:
            members_ptr = groups_ptr + piece // shared_splits * GROUP_SIZE
            if is_group:
                first_row = gl.load(members_ptr).to(gl.int64)
                split = piece % shared_splits
                part = own_splits + split
        exists = first_row >= 0
        last = gl.load(lengths_ptr + first_row, mask=exists, other=1).to(gl.int32) - 1
        shared = gl.load(shared_ptr + first_row, mask=exists, other=0).to(gl.int32)
        span = gl.load(split_lens_ptr + is_group.to(gl.int32)).to(gl.int32)
        start = split * span + gl.where(is_group, 0, shared)
        end = gl.where(is_group, shared, last)
        has_new = (split == 0) & (piece >= n_group_splits)
        if (start < end) | has_new:
            end = gl.minimum(start + span, end)
            n_tiles = gl.maximum(end - start + TILE - 1, 0) // TILE
            table_row = table_ptr + gl.load(slots_ptr + first_row).to(gl.int64) * table_stride
            if PDL and not READS_EARLY:
                jit.wait_for_previous()
            for number in gl.static_range(STAGES):
                at = start + number * TILE
                _copy_tiles(
                    k_desc, v_desc, arrived, ks, vs, table_row, at, column, number < n_tiles, number, BLOCK_SIZE
                )
            row = gl.where(member == 0, first_row, -1)
            if groups_ptr is not None:
                of_group = gl.load(members_ptr + member, mask=is_group & (member < GROUP_SIZE), other=-1).to(gl.int64)
                row = gl.where(is_group, of_group, row)
            head = kv_head * HEADS_PER_KEY + query % HEADS_PER_KEY
            new_block = gl.load(table_row + last // BLOCK_SIZE, mask=has_new, other=0).to(gl.int64)
            dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, loads))
            q_place = gl.convert_layout(row * q_stride + head * HEAD_DIM, gl.SliceLayout(1, loads))
            is_loaded = gl.convert_layout(row >= 0, gl.SliceLayout(1, loads))
            if PDL and READS_EARLY:
                jit.wait_for_previous()
            q = gl.load(q_ptr + q_place[:, None] + dim[None, :], mask=is_loaded[:, None], other=0.0)
            best = gl.full([QUERIES], float("-inf"), gl.float32, of_query)
            total = gl.zeros([QUERIES], gl.float32, of_query)
            acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, scores_layout)
            if has_new:
                # Write the new token's key and value to the cache, and begin the softmax with them.
                new_k = gl.load(new_k_ptr + first_row * new_k_stride + column + dim)
                new_v = gl.load(new_v_ptr + first_row * new_v_stride + column + dim)
                place = new_block * (BLOCK_SIZE * stride) + (last % BLOCK_SIZE) * stride + column
                gl.store(k_ptr + place + dim, new_k)
                gl.store(v_ptr + place + dim, new_v)
                score = gl.sum(q.to(gl.float32) * new_k.to(gl.float32)[None, :], axis=1) * scale
                best = gl.convert_layout(score, of_query)
                total = gl.full([QUERIES], 1.0, gl.float32, of_query)
                acc += gl.convert_layout(new_v, gl.SliceLayout(0, scores_layout)).to(gl.float32)[None, :]
            q = gl.convert_layout(q, left)
            lane = gl.arange(0, TILE, gl.SliceLayout(0, scores_layout))
            v_lane = gl.arange(0, TILE, gl.SliceLayout(1, right))
            for tile in range(n_tiles):
                stage = tile % STAGES
                position = start + tile * TILE
                mbarrier.wait(arrived.index(stage), (tile // STAGES) & 1)
                k = ks.index(stage).permute((1, 0)).load(right)
                scores = mma_v2(q, k, gl.zeros([QUERIES, TILE], gl.float32, scores_layout)) * scale
                scores = gl.where((position + lane < end)[None, :], scores, float("-inf"))
                new_best = gl.maximum(best, gl.max(scores, axis=1))
                weights = gl.exp2(scores - new_best[:, None])
                decay = gl.exp2(best - new_best)
                v = vs.index(stage).load(right)
                if position + TILE > end:  # positions beyond the end may hold NaN of another sequence
                    v = gl.where((position + v_lane < end)[:, None], v, 0.0)
                acc = mma_v2(gl.convert_layout(weights.to(v.dtype), left), v, acc * decay[:, None])
                total = total * decay + gl.sum(weights, axis=1)
                best = new_best
                next_tile = tile + STAGES
                _copy_tiles(
                    k_desc,
                    v_desc,
                    arrived,
                    ks,
                    vs,
                    table_row,
                    start + next_tile * TILE,
                    column,
                    next_tile < n_tiles,
                    stage,
                    BLOCK_SIZE,
                )
            cell = (row * n_heads + head) * n_parts + part
            out_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, scores_layout))
            out_place = partial_ptr + (cell * HEAD_DIM)[:, None] + out_dim[None, :]
            gl.store(out_place, acc / total[:, None], mask=(row >= 0)[:, None])
            if not ONE_PART:
                gl.store(log_sum_ptr + cell, best + gl.log2(total), mask=row >= 0)
