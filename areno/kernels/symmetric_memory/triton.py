# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Kernels in which the GPUs of a group meet, in two ways. Programs wait for their twins on the other GPUs only.

`add` and `add_and_norm`: a program writes its piece into the memory of the others, and adds theirs as soon as its own
memory has them. What has not come yet is EMPTY, so nothing has to be told: a number is there or it is not. Numbers go
one way only, and no fence waits for them. A piece has three places, which calls take in turn. A call empties the place
of the call before it. Nobody writes to that place before the next call but one, and so not before having what this GPU
writes in the next one, when it has been emptied.

`gather`, for numbers of which none can mean EMPTY: a program copies its piece into its region of this GPU's memory,
tells its twins, waits until they have told it, and reads their regions. Each region exists twice, and calls take
turns. So nobody has to wait until the others have read: who comes to write a region again has met the others once more
in between, and they had read it by then.

The calls of a program are counted on the device, so a CUDA graph can hold them. Counts may wrap around.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel

REGION = 16384  # bytes of a program's piece, at the most
PROGRAMS = 512  # most of a call
EMPTY = 0x8000  # of each 16 bits: -0 in bfloat16, for which 0 is written; in float32 twice, a number next to 0
_WARPS = 8
_CLEARED = tl.constexpr(2048)  # bytes that are emptied together, so that wide stores do it
_EMPTY_16 = tl.constexpr(EMPTY - 2**16)
_EMPTY_32 = tl.constexpr(EMPTY * (2**16 + 1) - 2**32)


@dataclass(frozen=True)
class Shared:
    """What the kernels need to know of a group.

    inboxes, shown, signals: addresses, on the device, of tables with the address of a tensor of each GPU. These tensors
    are 3 x size x PROGRAMS regions, EMPTY at first; 2 x PROGRAMS regions; size x PROGRAMS counters of int32, which were
    zero.
    turns: int32 (2, PROGRAMS), zero at first, of this GPU alone: which of the three is next, and how much the last call
    used. counts: int32 (PROGRAMS,), also zero and its own.
    """

    rank: int
    size: int
    inboxes: int
    turns: Tensor
    shown: int
    signals: int
    counts: Tensor


def add(x: Tensor, shared: Shared) -> Tensor:
    """The sum of x over the GPUs, added in float32 in the order of the ranks.

    x: contiguous, bfloat16 or float32; at most REGION * PROGRAMS bytes. The call is collective.
    """
    out = torch.empty_like(x)
    piece = REGION // x.element_size()
    _meet_add_kernel[(triton.cdiv(x.numel(), piece),)](
        x, out, x.numel(), shared.inboxes, shared.turns, shared.rank,
        SIZE=shared.size, PIECE=piece, N_PROGRAMS=PROGRAMS, num_warps=_WARPS,
    )  # fmt: skip
    return out


def add_and_norm(
    x_ND: Tensor, part_ND: Tensor, weight_D: Tensor, eps: float, plus_one: bool, shared: Shared
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of x and the sum of `part` over the GPUs, which is rounded to the dtype of `part` first.

    The squares of a row may be added in another order.

    At most PROGRAMS rows of REGION bytes each. The call is collective.
    """
    n, size = x_ND.shape
    block = triton.next_power_of_2(size)
    sum_ND, normed_ND = torch.empty_like(x_ND), torch.empty_like(x_ND, dtype=weight_D.dtype)
    _meet_add_norm_kernel[(n,)](
        x_ND, part_ND, sum_ND, weight_D, normed_ND, size, eps, shared.inboxes, shared.turns, shared.rank,
        SIZE=shared.size, PIECE=REGION // part_ND.element_size(), N_PROGRAMS=PROGRAMS, PLUS_ONE=plus_one,
        BLOCK=block, num_warps=_WARPS if block <= 4096 else 4,  # 256 rows of 5,120: 13.0 us, and 14.4 with 8
    )  # fmt: skip
    return sum_ND, normed_ND


def gather(x: Tensor, shared: Shared) -> Tensor:
    """x of all GPUs, (size, *x.shape).

    x: contiguous, int32; at most REGION * PROGRAMS bytes. The call is collective.
    """
    out = x.new_empty((shared.size, *x.shape))
    piece = REGION // x.element_size()
    _meet_gather_kernel[(triton.cdiv(x.numel(), piece),)](
        x, out, x.numel(), shared.shown, shared.signals, shared.counts, shared.rank,
        SIZE=shared.size, PIECE=piece, N_PROGRAMS=PROGRAMS, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _sum_of_all(
    x,
    lane,
    inside,
    n_inside,
    inboxes_ptr,
    turns_ptr,
    rank,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    N_PROGRAMS: tl.constexpr,
):
    """The sum of x (a piece or the beginning of one, n_inside numbers) over the program's twins, in float32."""
    program = tl.program_id(0)
    IS_WIDE: tl.constexpr = x.dtype == tl.float32
    NUMBER: tl.constexpr = tl.int32 if IS_WIDE else tl.int16
    NONE: tl.constexpr = _EMPTY_32.value if IS_WIDE else _EMPTY_16.value
    N_BYTES: tl.constexpr = 4 if IS_WIDE else 2
    inboxes = inboxes_ptr.to(tl.pointer_type(tl.uint64))
    turn, n_used = tl.load(turns_ptr + program), tl.load(turns_ptr + N_PROGRAMS + program)
    bits = x.to(NUMBER, bitcast=True)
    bits = tl.where(bits == NONE, 0, bits).to(NUMBER)
    place = (turn * SIZE + rank) * N_PROGRAMS + program
    for step in tl.static_range(1, SIZE):
        theirs = tl.multiple_of(tl.load(inboxes + (rank + step) % SIZE).to(tl.pointer_type(NUMBER)), 16)
        tl.store(theirs + place * PIECE + lane, bits, mask=inside)
    inbox = tl.load(inboxes + rank)
    pairs = tl.multiple_of(inbox.to(tl.pointer_type(tl.int32)), 16)
    pair = tl.arange(0, PIECE * N_BYTES // 4)
    nothing = tl.full([PIECE * N_BYTES // 4], _EMPTY_32.value, tl.int32)
    for step in tl.static_range(1, SIZE):
        place = ((turn + 2) % 3 * SIZE + (rank + step) % SIZE) * N_PROGRAMS + program
        tl.store(pairs + place * (PIECE * N_BYTES // 4) + pair, nothing, mask=pair // (_CLEARED // 4) < n_used)
    numbers = tl.multiple_of(inbox.to(tl.pointer_type(NUMBER)), 16)
    total = tl.zeros(x.shape, tl.float32)
    for each in tl.static_range(SIZE):
        found = bits
        if each != rank:
            come = numbers + ((turn * SIZE + each) * N_PROGRAMS + program) * PIECE + lane
            found = tl.load(come, mask=inside, other=0, volatile=True)
            while tl.sum((found == NONE).to(tl.int32), 0) > 0:
                found = tl.load(come, mask=inside, other=0, volatile=True)
        total += found.to(x.dtype, bitcast=True).to(tl.float32)
    tl.debug_barrier()  # all threads know the turn: of a short row, warps have copies, and sums do not make them meet
    tl.store(turns_ptr + program, (turn + 1) % 3)
    tl.store(turns_ptr + N_PROGRAMS + program, tl.cdiv(n_inside * N_BYTES, _CLEARED))
    return total


@kernel
def _meet_add_kernel(
    x_ptr,
    out_ptr,
    n,
    inboxes_ptr,
    turns_ptr,
    rank,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    N_PROGRAMS: tl.constexpr,
):
    """A piece."""
    first, lane = tl.program_id(0) * PIECE, tl.arange(0, PIECE)
    inside = first + lane < n
    x = tl.load(x_ptr + first + lane, mask=inside, other=0.0)
    total = _sum_of_all(
        x, lane, inside, tl.minimum(n - first, PIECE), inboxes_ptr, turns_ptr, rank, SIZE, PIECE, N_PROGRAMS
    )
    tl.store(out_ptr + first + lane, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel
def _meet_add_norm_kernel(
    x_ptr,
    part_ptr,
    sum_ptr,
    weight_ptr,
    normed_ptr,
    size,
    eps,
    inboxes_ptr,
    turns_ptr,
    rank,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    N_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """A row."""
    column = tl.arange(0, BLOCK)
    inside = column < size
    index = tl.program_id(0).to(tl.int64) * size + column
    part = tl.load(part_ptr + index, mask=inside, other=0.0)
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = _sum_of_all(part, column, inside, size, inboxes_ptr, turns_ptr, rank, SIZE, PIECE, N_PROGRAMS)
    rounded = (x + total.to(part.dtype).to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + index, rounded, mask=inside)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if PLUS_ONE:
        weight += 1.0
    tl.store(normed_ptr + index, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)


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


@kernel
def _meet_gather_kernel(
    x_ptr,
    out_ptr,
    n,
    shown_ptr,
    signals_ptr,
    counts_ptr,
    rank,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    N_PROGRAMS: tl.constexpr,
):
    """A piece."""
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    shown = shown_ptr.to(tl.pointer_type(tl.uint64))
    lane = tl.arange(0, PIECE)
    index = program * PIECE + lane
    inside = index < n
    place = ((count & 1) * N_PROGRAMS + program) * PIECE + lane
    mine = tl.multiple_of(tl.load(shown + rank).to(tl.pointer_type(tl.int32)), 16)
    tl.store(mine + place, tl.load(x_ptr + index, mask=inside, other=0), mask=inside)
    _meet_others(signals_ptr, program, count, rank, SIZE, N_PROGRAMS)
    for each in tl.static_range(SIZE):
        theirs = tl.multiple_of(tl.load(shown + each).to(tl.pointer_type(tl.int32)), 16)
        # Past the first cache, which may hold what stood there two calls before.
        found = tl.load(theirs + place, mask=inside, other=0, cache_modifier=".cg")
        tl.store(out_ptr + each * n + index, found, mask=inside)
    tl.store(counts_ptr + program, count)
