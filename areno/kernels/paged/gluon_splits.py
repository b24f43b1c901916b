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
    from areno.kernels.fp8.triton import decode_pairs, scales, scales_for, to_e4m3
    from areno.kernels.jit import copy_tile, gl, gluon, mbarrier, mma_v2

# Positions of a tile, tiles in shared memory, and warps: the fastest on an H200. With tiles of 32 positions, a rollout
# of Qwen3-0.6B with 64 samples takes 2 % longer, and with 4 tiles in shared memory 2.5 % longer.
_TILE, _STAGES = 16, 3
_FP8_STAGES = 4  # with 5 or 6, fewer programs fit on a multiprocessor, and rows of 400 positions take longer
_QUERIES = 16  # of a warp, as many as a matrix instruction has
_MAX_WARPS = 2  # with groups of 32 queries, 256 rows of 8B take 7 % less than in Triton, and in FP8 10 % less
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
    n_warps = -(-constants["HEADS_PER_KEY"] * constants["GROUP_SIZE"] // _QUERIES)
    is_supported = (
        n_warps <= _MAX_WARPS
        and head_dim in _HEAD_DIMS
        and constants["BLOCK_SIZE"] % _TILE == 0
        and (is_fp8 or q_BHC.dtype == kv_blocks.dtype)
        and q_BHC.dtype in (torch.bfloat16, torch.float16)
    )
    if not is_supported or not jit.can_run_gluon(q_BHC.device, "_gluon_split_kernel"):
        return False
    return jit.launch_gluon(
        _gluon_split_kernel,
        grid,
        _tiles(kv_blocks[0]),
        _tiles(kv_blocks[1].view(torch.int16) if is_fp8 else kv_blocks[1]),
        *([None] * 4 if exponents is None else _exponents(exponents)),
        *arguments,
        **constants,
        QUERIES=_QUERIES * n_warps,
        STAGES=_FP8_STAGES if is_fp8 else _STAGES,
        READS_EARLY=reads_early,
        num_warps=n_warps,
    )


def _tiles(blocks: Tensor) -> Any:
    return jit.tile_descriptor(blocks.flatten(0, 1).flatten(1), _TILE, blocks.shape[-1])


def _exponents(exponents: Tensor) -> tuple[Any, ...]:
    """Return descriptors of the exponents of keys and values, and both tensors."""
    return *(jit.tile_descriptor(each.flatten(0, 1), 1, _TILE) for each in exponents), *exponents


if HAS_GLUON:
    _ALIGNED = gl.constexpr(128 // _TILE)  # tiles of exponents in 128 bytes, of which TMA writes to multiples

    @gluon.jit
    def _copy_tiles(sources, arrived, targets, table_row, position, exists, stage, BLOCK_SIZE: gl.constexpr):
        """Begin to copy the tiles of keys and values at `position` to index `stage` of shared memory, if they exist."""
        k_desc, v_desc, k_exponents_desc, v_exponents_desc = sources
        ks, vs, k_exponents, v_exponents = targets
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
        k_column = gl.program_id(0) * k_desc.block_type.shape[1]
        v_column = gl.program_id(0) * v_desc.block_type.shape[1]
        copy_tile(k_desc, [at, k_column], ready, ks.index(stage), pred=exists)
        copy_tile(v_desc, [at, v_column], ready, vs.index(stage), pred=exists)

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

        The queries of a split are those of one row, or of the rows of a prefix group, padded to QUERIES, 16 for each
        warp. Shared memory holds STAGES tiles of keys and as many of values. Each pair of tiles has a barrier, which
        counts the bytes that have arrived.

        Codes of FP8 become float16 by one instruction for two of them, and bfloat16 by several, which would take longer
        than the copies. So products are those of float16: queries times a power of two that keeps them in its range,
        and weights times the scale of each value over the largest scale so far, `unit`, by which sums are divided.
        Values are pairs of codes, because shared memory gives matrix instructions columns of 16 bits only. `evens` and
        `odds` are the sums of the first and of the second codes.
        """
        if PDL:
            jit.launch_dependents()
        TILE: gl.constexpr = k_desc.block_type.shape[0]
        HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
        scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 8]
        )
        IS_FP8: gl.constexpr = k_exponents_desc is not None
        WIDTH: gl.constexpr = 4 if IS_FP8 else 2  # of elements in 32 bits
        left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=2)
        right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=scores_layout, k_width=2)
        q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=WIDTH)
        k_layout: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=scores_layout, k_width=WIDTH)
        of_query: gl.constexpr = gl.SliceLayout(1, scores_layout)
        of_position: gl.constexpr = gl.SliceLayout(0, scores_layout)
        of_q_dim: gl.constexpr = gl.SliceLayout(0, q_layout)
        ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, HEAD_DIM], k_desc.layout)
        vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, v_desc.block_type.shape[1]], v_desc.layout)
        k_exponents, v_exponents = None, None
        if IS_FP8:
            k_exponents = gl.allocate_shared_memory(gl.uint8, [_ALIGNED * STAGES, 1, TILE], k_exponents_desc.layout)
            v_exponents = gl.allocate_shared_memory(gl.uint8, [_ALIGNED * STAGES, 1, TILE], v_exponents_desc.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        sources, targets = (k_desc, v_desc, k_exponents_desc, v_exponents_desc), (ks, vs, k_exponents, v_exponents)
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
                _copy_tiles(sources, arrived, targets, table_row, at, number < n_tiles, number, BLOCK_SIZE)
            row = gl.where(member == 0, first_row, -1)
            if groups_ptr is not None:
                of_group = gl.load(members_ptr + member, mask=is_group & (member < GROUP_SIZE), other=-1).to(gl.int64)
                row = gl.where(is_group, of_group, row)
            head = kv_head * HEADS_PER_KEY + query % HEADS_PER_KEY
            new_block = gl.load(table_row + last // BLOCK_SIZE, mask=has_new, other=0).to(gl.int64)
            dim = gl.arange(0, HEAD_DIM, of_q_dim)
            q_place = gl.convert_layout(row * q_stride + head * HEAD_DIM, gl.SliceLayout(1, q_layout))
            is_loaded = gl.convert_layout(row >= 0, gl.SliceLayout(1, q_layout))
            if PDL and READS_EARLY:
                jit.wait_for_previous()
            q = gl.load(q_ptr + q_place[:, None] + dim[None, :], mask=is_loaded[:, None], other=0.0)
            best = gl.full([QUERIES], float("-inf"), gl.float32, of_query)
            total = gl.zeros([QUERIES], gl.float32, of_query)
            acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, scores_layout)
            evens = gl.zeros([QUERIES, HEAD_DIM // 2], gl.float32, scores_layout)
            odds = gl.zeros([QUERIES, HEAD_DIM // 2], gl.float32, scores_layout)
            unit = start * 0  # an exponent, as those of scales
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
                    pair = gl.arange(0, HEAD_DIM // 2, gl.SliceLayout(0, scores_layout))
                    pairs = new_v_ptr + first_row * new_v_stride + column + 2 * pair
                    evens += (gl.load(pairs).to(gl.float32) * scales(254 - unit))[None, :]
                    odds += (gl.load(pairs + 1).to(gl.float32) * scales(254 - unit))[None, :]
                else:
                    acc += gl.convert_layout(new_v, gl.SliceLayout(0, scores_layout)).to(gl.float32)[None, :]
            q_scale = 1.0
            if IS_FP8:
                q, q_scale = _in_float16(q)
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
                inside_v = (position + v_lane < end)[:, None]  # beyond the end may be NaN of another sequence
                if IS_FP8:
                    exponents = v_exponents.index(_ALIGNED * stage).reshape((TILE,)).load(of_position).to(gl.int32)
                    exponents = gl.where(position + lane < end, exponents, 0)
                    new_unit = gl.maximum(unit, gl.max(exponents, axis=0))
                    weights *= scales(gl.maximum(127 + exponents - new_unit, 0))[None, :]
                    grows = True  # a maximum over warps would take longer than the products
                    if num_warps == 1:
                        grows = (gl.max((new_best > best).to(gl.int32), axis=0) > 0) | (new_unit > unit)
                    if grows:
                        decay *= scales(gl.maximum(127 + unit - new_unit, 0))
                        evens *= decay[:, None]
                        odds *= decay[:, None]
                    unit = new_unit
                    pairs = vs.index(stage).load(right)
                    if position + TILE > end:
                        pairs = gl.where(inside_v, pairs, 0)
                    even_v, odd_v = decode_pairs(pairs, gl.float16)
                    weights = gl.convert_layout(weights.to(gl.float16), left)
                    evens = mma_v2(weights, even_v, evens)
                    odds = mma_v2(weights, odd_v, odds)
                else:
                    v = vs.index(stage).load(right)
                    if position + TILE > end:
                        v = gl.where(inside_v, v, 0.0)
                    acc = mma_v2(gl.convert_layout(weights.to(v.dtype), left), v, acc * decay[:, None])
                best = new_best
                next_tile = tile + STAGES
                at = start + next_tile * TILE
                _copy_tiles(sources, arrived, targets, table_row, at, next_tile < n_tiles, stage, BLOCK_SIZE)
            cell = (row * n_heads + head) * n_parts + part
            if IS_FP8:
                acc = gl.join(evens, odds).reshape((QUERIES, HEAD_DIM)) * scales(unit)
            out_layout: gl.constexpr = acc.type.layout
            out_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
            of_out: gl.constexpr = gl.SliceLayout(1, out_layout)
            out_place = partial_ptr + (gl.convert_layout(cell, of_out) * HEAD_DIM)[:, None] + out_dim[None, :]
            is_real = gl.convert_layout(row >= 0, of_out)[:, None]
            gl.store(out_place, acc / gl.convert_layout(total, of_out)[:, None], mask=is_real)
            if not ONE_PART:
                gl.store(log_sum_ptr + cell, best + gl.log2(total), mask=row >= 0)
