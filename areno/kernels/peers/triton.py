# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""One kernel in which the GPUs of a group meet: each shows the others its numbers, waits for theirs, and reads them.

A program works on a piece of the tensor. It copies the piece into its region of this GPU's shared memory, tells the
same program on the other GPUs, waits until they have told it, and reads their regions. So programs wait for their twins
only, and a GPU that is ahead waits no longer than it must.

Each region exists twice, and calls take turns. So nobody has to wait until the others have read: who comes to write a
region again has met the others once more in between, and they had read it by then. The calls of a program are counted
on the device, so a CUDA graph can hold them. Counts may wrap around.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

REGION = 16384  # bytes that a program shows at a time
PROGRAMS = 512  # most of a call
_WARPS = 8  # fastest on an H200 for 16 to 256 rows of 2,560 to 5,120 numbers, with pieces of 8,192 of them


@dataclass(frozen=True)
class Shared:
    """What the kernel needs to know of a group.

    buffers, signals: addresses, on the device, of a table with the address of each GPU's shared memory: 2 x PROGRAMS
    regions, and size x PROGRAMS counters of int32, which were zero. counts: int32 (PROGRAMS,), zero, of this GPU alone.
    """

    rank: int
    size: int
    buffers: int
    signals: int
    counts: Tensor


def meet(x: Tensor, shared: Shared, *, adds: bool) -> Tensor:
    """The sum of x over the GPUs, added in float32 in the order of the ranks; else all of them, (size, *x.shape).

    x: contiguous, bfloat16 or float32 where it is added, else int32; at most REGION * PROGRAMS bytes. The call is
    collective.
    """
    out = torch.empty_like(x) if adds else x.new_empty((shared.size, *x.shape))
    piece = REGION // x.element_size()
    _meet_kernel[(triton.cdiv(x.numel(), piece),)](
        x, out, x.numel(), shared.buffers, shared.signals, shared.counts, shared.rank,
        SIZE=shared.size, PIECE=piece, N_PROGRAMS=PROGRAMS, ADDS=adds, num_warps=_WARPS,
    )  # fmt: skip
    return out


def meet_and_norm(
    x_ND: Tensor, part_ND: Tensor, weight_D: Tensor, eps: float, plus_one: bool, shared: Shared
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of x and the sum of `part` over the GPUs, which is rounded to the dtype of `part` first.

    The squares of a row may be added in another order.

    At most PROGRAMS rows of REGION bytes each. The call is collective.
    """
    n, size = x_ND.shape
    block = triton.next_power_of_2(size)
    sum_ND, normed_ND = torch.empty_like(x_ND), torch.empty_like(x_ND, dtype=weight_D.dtype)
    _meet_norm_kernel[(n,)](
        x_ND, part_ND, sum_ND, weight_D, normed_ND, size, eps,
        shared.buffers, shared.signals, shared.counts, shared.rank,
        SIZE=shared.size, PIECE=REGION // part_ND.element_size(), N_PROGRAMS=PROGRAMS, PLUS_ONE=plus_one,
        BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return sum_ND, normed_ND


@triton.jit
def _meet_others(signals_ptr, program, count, rank, SIZE: tl.constexpr, N_PROGRAMS: tl.constexpr):
    """Tell the program's twins that what it has written can be read, and wait until they have told it the same."""
    signals = signals_ptr.to(tl.pointer_type(tl.uint64))
    tl.debug_barrier()  # all threads have written
    for step in tl.static_range(1, SIZE):
        other = (rank + step) % SIZE
        signal = tl.load(signals + other).to(tl.pointer_type(tl.int32)) + rank * N_PROGRAMS + program
        tl.atomic_xchg(signal, count, sem="release", scope="sys")
    own_signals = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, SIZE):
        signal = own_signals + (rank + step) % SIZE * N_PROGRAMS + program
        while tl.atomic_add(signal, 0, sem="acquire", scope="sys") - count < 0:
            pass
    tl.debug_barrier()


@triton.jit
def _sum_of_all(buffers, place, inside, total, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """What all GPUs show at a place, added to `total` in the order of the ranks."""
    for each in tl.static_range(SIZE):
        theirs = tl.multiple_of(tl.load(buffers + each).to(tl.pointer_type(DTYPE)), 16)
        # Past the first cache, which may hold what stood there two calls before.
        total += tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _meet_kernel(
    x_ptr,
    out_ptr,
    n,
    buffers_ptr,
    signals_ptr,
    counts_ptr,
    rank,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    N_PROGRAMS: tl.constexpr,
    ADDS: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    buffers = buffers_ptr.to(tl.pointer_type(tl.uint64))
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    lane = tl.arange(0, PIECE)
    index = program * PIECE + lane
    inside = index < n
    place = ((count & 1) * N_PROGRAMS + program) * PIECE + lane
    mine = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(dtype)), 16)
    tl.store(mine + place, tl.load(x_ptr + index, mask=inside, other=0), mask=inside)
    _meet_others(signals_ptr, program, count, rank, SIZE, N_PROGRAMS)
    if ADDS:
        total = _sum_of_all(buffers, place, inside, tl.zeros([PIECE], tl.float32), SIZE, dtype)
        tl.store(out_ptr + index, total.to(dtype), mask=inside)
    else:
        for each in tl.static_range(SIZE):
            theirs = tl.multiple_of(tl.load(buffers + each).to(tl.pointer_type(dtype)), 16)
            found = tl.load(theirs + place, mask=inside, other=0, cache_modifier=".cg")
            tl.store(out_ptr + each * n + index, found, mask=inside)
    tl.store(counts_ptr + program, count)


@triton.jit
def _meet_norm_kernel(
    x_ptr,
    part_ptr,
    sum_ptr,
    weight_ptr,
    normed_ptr,
    size,
    eps,
    buffers_ptr,
    signals_ptr,
    counts_ptr,
    rank,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    N_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """A row."""
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row) + 1
    buffers = buffers_ptr.to(tl.pointer_type(tl.uint64))
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < size
    index = row.to(tl.int64) * size + column
    place = ((count & 1) * N_PROGRAMS + row) * PIECE + column
    mine = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(dtype)), 16)
    tl.store(mine + place, tl.load(part_ptr + index, mask=inside, other=0.0), mask=inside)
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    _meet_others(signals_ptr, row, count, rank, SIZE, N_PROGRAMS)
    total = _sum_of_all(buffers, place, inside, tl.zeros([BLOCK], tl.float32), SIZE, dtype)
    rounded = (x + total.to(dtype).to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + index, rounded, mask=inside)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if PLUS_ONE:
        weight += 1.0
    tl.store(normed_ptr + index, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)
    tl.store(counts_ptr + row, count)
