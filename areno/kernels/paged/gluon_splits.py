# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
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
    from areno.kernels.fp8.triton import scales, scales_for, to_e4m3
    from areno.kernels.jit import copy_tile, gl, gluon, mbarrier, mma_v2

# Positions of a tile, tiles in shared memory, and warps: the fastest on an H200. With tiles of 32 positions, a rollout
# of Qwen3-0.6B with 64 samples takes 2 % longer, and with 4 tiles in shared memory 2.5 % longer.
_TILE, _STAGES, _WARPS = 16, 3, 1
_FP8_TILE = 32  # as many bytes
_FP8_LEAST_HEADS = 3  # for each key head. On an H200, 4 take 220 us (362 in Triton), and 2 take 316 us (268 in Triton).
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
    exponents: Tensor | None,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    reads_early: bool,
) -> bool:
    """Compute all splits if Gluon runs on the device and supports the sizes. Return whether it did.

    `arguments` are the positional arguments of `_split_kernel`.
    """
    head_dim, is_fp8 = kv_blocks.shape[-1], exponents is not None
    tile = _FP8_TILE if is_fp8 else _TILE
    is_supported = (
        constants["HEADS_PER_KEY"] * constants["GROUP_SIZE"] <= _QUERIES
        and head_dim in _HEAD_DIMS
        and constants["BLOCK_SIZE"] % tile == 0
        and (constants["HEADS_PER_KEY"] >= _FP8_LEAST_HEADS if is_fp8 else q_BHC.dtype == kv_blocks.dtype)
        and q_BHC.dtype in (torch.bfloat16, torch.float16)
    )
    if not is_supported or not jit.can_run_gluon(q_BHC.device, "_gluon_split_kernel"):
        return False
    return jit.launch_gluon(
        _gluon_split_kernel,
        grid,
        *(jit.tile_descriptor(blocks.flatten(0, 1).flatten(1), tile, head_dim) for blocks in kv_blocks),
        *([None] * 4 if exponents is None else _exponents(exponents, tile)),
        *arguments,
        **constants,
        QUERIES=_QUERIES,
        STAGES=_STAGES,
        READS_EARLY=reads_early,
        num_warps=_WARPS,
    )


def _exponents(exponents: Tensor, tile: int) -> tuple[Any, ...]:
    """Return descriptors of the exponents of keys and values, and both tensors."""
    return *(jit.tile_descriptor(each.flatten(0, 1), 1, tile) for each in exponents), *exponents


if HAS_GLUON:
    _ALIGNED = gl.constexpr(128 // _FP8_TILE)  # tiles of exponents in 128 bytes, of which TMA writes to multiples

    @gluon.jit
    def _copy_tiles(
        k_desc,
        v_desc,
        k_exponents_desc,
        v_exponents_desc,
        arrived,
        ks,
        vs,
        k_exponents,
        v_exponents,
        table_row,
        position,
        column,
        exists,
        stage,
        BLOCK_SIZE: gl.constexpr,
    ):
        """Begin to copy the tiles of keys and values at `position` to index `stage` of shared memory, if they exist."""
        block = gl.load(table_row + position // BLOCK_SIZE, mask=exists, other=0)
        at = block * BLOCK_SIZE + position % BLOCK_SIZE
        ready = arrived.index(stage)
        n_bytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
        if k_exponents_desc is None:
            mbarrier.expect(ready, n_bytes, pred=exists)
        else:
            mbarrier.expect(ready, n_bytes + 2 * k_exponents_desc.block_type.nbytes, pred=exists)
            line = block * gl.num_programs(0) + gl.program_id(0)
            copy_tile(
                k_exponents_desc, [line, position % BLOCK_SIZE], ready, k_exponents.index(_ALIGNED * stage), pred=exists
            )
            copy_tile(
                v_exponents_desc, [line, position % BLOCK_SIZE], ready, v_exponents.index(_ALIGNED * stage), pred=exists
            )
        copy_tile(k_desc, [at, column], ready, ks.index(stage), pred=exists)
        copy_tile(v_desc, [at, column], ready, vs.index(stage), pred=exists)

    @gluon.jit
    def _store_codes(codes_ptr, exponent_ptr, x):
        """Do `store_codes` of `triton_rows.py`, and return the exponent."""
        exponent, inverse = scales_for(gl.max(gl.abs(x.to(gl.float32)).to(gl.int32, bitcast=True), axis=0))
        gl.store(codes_ptr, to_e4m3(x.to(gl.float32) * inverse).to(gl.uint8, bitcast=True))
        gl.store(exponent_ptr, exponent.to(gl.uint8))
        return exponent

    @gluon.jit
    def _in_float16(q):
        """Return queries divided by a power of two so that the largest is near 2^14, and this power."""
        largest = gl.max(gl.max(gl.abs(q.to(gl.float32)), axis=1), axis=0)
        exponent = gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) - 14, 1)
        return (q.to(gl.float32) * scales(254 - exponent)).to(gl.float16), scales(exponent)

    @gluon.jit
    def _values_in_float16(tile, right: gl.constexpr):
        """Load a tile of FP8 values in the layout of a product's right side, with its dims as `_dims_of_values`.

        The layout wants consecutive positions of one dim in a thread. Shared memory has consecutive dims. So a thread
        loads four dims at once, which become columns of four matrix instructions.
        """
        TILE: gl.constexpr = tile.shape[0]
        DIMS: gl.constexpr = tile.shape[1]
        BASES: gl.constexpr = [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [0, 32], [0, 64]]
        layout: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=BASES if DIMS == 128 else BASES[:-1],
            lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
            warp_bases=[],
            block_bases=[],
            shape=[TILE, DIMS],
        )
        v = tile.load(layout).to(gl.float16)
        v = v.reshape((TILE, DIMS // 32, 8, 4)).permute((0, 1, 3, 2)).reshape((TILE, DIMS))
        return gl.convert_layout(v, right)

    @gluon.jit
    def _dims_of_values(column):
        return column // 32 * 32 + column % 8 * 4 + column // 8 % 4

    @gluon.jit(**SPECIALISATION)
    def _gluon_split_kernel(
        k_desc,
        v_desc,
        k_exponents_desc,
        v_exponents_desc,
        k_exponents_ptr,
        v_exponents_ptr,
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

        Codes of FP8 become float16 by one instruction for two of them, and bfloat16 by several, which would take longer
        than the copies. So products are those of float16: queries times a power of two that keeps them in its range,
        and weights times the scale of each value over the largest scale so far, `unit`, by which `acc` is divided.
        """
        if PDL:
            jit.launch_dependents()
        TILE: gl.constexpr = k_desc.block_type.shape[0]
        HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
        scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[1, num_warps], instr_shape=[16, 8]
        )
        IS_FP8: gl.constexpr = k_exponents_desc is not None
        WIDTH: gl.constexpr = 4 if IS_FP8 else 2  # of elements in 32 bits
        left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=2)
        right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=scores_layout, k_width=2)
        q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=WIDTH)
        k_layout: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=scores_layout, k_width=WIDTH)
        of_query: gl.constexpr = gl.SliceLayout(1, scores_layout)
        of_position: gl.constexpr = gl.SliceLayout(0, scores_layout)
        # 16 bytes of a query for each thread
        loads: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [num_warps, 1], [1, 0])
        ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, HEAD_DIM], k_desc.layout)
        vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, HEAD_DIM], v_desc.layout)
        k_exponents, v_exponents = None, None
        if IS_FP8:
            k_exponents = gl.allocate_shared_memory(gl.uint8, [_ALIGNED * STAGES, 1, TILE], k_exponents_desc.layout)
            v_exponents = gl.allocate_shared_memory(gl.uint8, [_ALIGNED * STAGES, 1, TILE], v_exponents_desc.layout)
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
                    k_desc,
                    v_desc,
                    k_exponents_desc,
                    v_exponents_desc,
                    arrived,
                    ks,
                    vs,
                    k_exponents,
                    v_exponents,
                    table_row,
                    at,
                    column,
                    number < n_tiles,
                    number,
                    BLOCK_SIZE,
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
            unit = start * 0  # an exponent, as those of scales
            out_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, scores_layout))
            if IS_FP8:
                out_dim = _dims_of_values(out_dim)
            if has_new:
                # Write the new token's key and value to the cache, and begin the softmax with them.
                new_k = gl.load(new_k_ptr + first_row * new_k_stride + column + dim)
                new_v = gl.load(new_v_ptr + first_row * new_v_stride + column + dim)
                place = new_block * (BLOCK_SIZE * stride) + (last % BLOCK_SIZE) * stride + column
                if IS_FP8:
                    exponent_place = (new_block * gl.num_programs(0) + kv_head) * BLOCK_SIZE + last % BLOCK_SIZE
                    _store_codes(k_ptr + place + dim, k_exponents_ptr + exponent_place, new_k)
                    unit = _store_codes(v_ptr + place + dim, v_exponents_ptr + exponent_place, new_v)
                else:
                    gl.store(k_ptr + place + dim, new_k)
                    gl.store(v_ptr + place + dim, new_v)
                score = gl.sum(q.to(gl.float32) * new_k.to(gl.float32)[None, :], axis=1) * scale
                best = gl.convert_layout(score, of_query)
                total = gl.full([QUERIES], 1.0, gl.float32, of_query)
                if IS_FP8:
                    of_dims = gl.load(new_v_ptr + first_row * new_v_stride + column + out_dim).to(gl.float32)
                    acc += (of_dims * scales(254 - unit))[None, :]
                else:
                    acc += gl.convert_layout(new_v, gl.SliceLayout(0, scores_layout)).to(gl.float32)[None, :]
            q_scale = 1.0
            if IS_FP8:
                q, q_scale = _in_float16(q)
            q = gl.convert_layout(q, q_layout)
            lane = gl.arange(0, TILE, of_position)
            v_lane = gl.arange(0, TILE, gl.SliceLayout(1, right))
            for tile in range(n_tiles):
                stage = tile % STAGES
                position = start + tile * TILE
                mbarrier.wait(arrived.index(stage), (tile // STAGES) & 1)
                k = ks.index(stage).permute((1, 0)).load(k_layout)
                if IS_FP8:
                    k_scale = scales(k_exponents.index(_ALIGNED * stage).reshape((TILE,)).load(of_position)) * (
                        q_scale * scale
                    )
                    scores = mma_v2(q, k.to(gl.float16), gl.zeros([QUERIES, TILE], gl.float32, scores_layout))
                    scores *= k_scale[None, :]
                else:
                    scores = mma_v2(q, k, gl.zeros([QUERIES, TILE], gl.float32, scores_layout)) * scale
                scores = gl.where((position + lane < end)[None, :], scores, float("-inf"))
                new_best = gl.maximum(best, gl.max(scores, axis=1))
                weights = gl.exp2(scores - new_best[:, None])
                decay = gl.exp2(best - new_best)
                total = total * decay + gl.sum(weights, axis=1)
                if IS_FP8:
                    v = _values_in_float16(vs.index(stage), right)
                    exponents = v_exponents.index(_ALIGNED * stage).reshape((TILE,)).load(of_position).to(gl.int32)
                    exponents = gl.where(position + lane < end, exponents, 0)
                    new_unit = gl.maximum(unit, gl.max(exponents, axis=0))
                    weights *= scales(gl.maximum(127 + exponents - new_unit, 0))[None, :]
                    decay *= scales(gl.maximum(127 + unit - new_unit, 0))
                    unit = new_unit
                else:
                    v = vs.index(stage).load(right)
                if position + TILE > end:  # positions beyond the end may hold NaN of another sequence
                    v = gl.where((position + v_lane < end)[:, None], v, 0.0)
                acc = mma_v2(gl.convert_layout(weights.to(v.dtype), left), v, acc * decay[:, None])
                best = new_best
                next_tile = tile + STAGES
                _copy_tiles(
                    k_desc,
                    v_desc,
                    k_exponents_desc,
                    v_exponents_desc,
                    arrived,
                    ks,
                    vs,
                    k_exponents,
                    v_exponents,
                    table_row,
                    start + next_tile * TILE,
                    column,
                    next_tile < n_tiles,
                    stage,
                    BLOCK_SIZE,
                )
            cell = (row * n_heads + head) * n_parts + part
            if IS_FP8:
                acc *= scales(unit)
            out_place = partial_ptr + (cell * HEAD_DIM)[:, None] + out_dim[None, :]
            gl.store(out_place, acc / total[:, None], mask=(row >= 0)[:, None])
            if not ONE_PART:
                gl.store(log_sum_ptr + cell, best + gl.log2(total), mask=row >= 0)
