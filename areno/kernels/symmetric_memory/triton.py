# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Collectives through symmetric memory as Triton kernels. A program waits only for the same program on other GPUs.

`all_reduce` and `add_and_norm`: a program writes its part of the tensor into the inboxes of the other GPUs, and adds
their parts as soon as they arrive in its own inbox. Inboxes are filled with EMPTY, a bit pattern that no summand has,
so the arrival of an element needs no signal and no fence. An inbox has three slots for each part, which calls use in
turn, and each call empties the slot of the previous call. This is safe: the other GPUs write to that slot again two
calls after its use. Until then, they need this GPU's data of the call in between, and this GPU sends that data only
after it has emptied the slot.

`all_gather`, for int32 elements of any bit pattern: a program copies its part into its region of this GPU's outbox,
signals the other GPUs, waits for their signals, and reads their regions. Each region exists twice, and calls alternate
between the two. So a program may overwrite a region without waiting for readers: the barrier of the call in between has
made sure that all GPUs have read it.

Programs count their calls in device memory, so a CUDA graph can capture the launches. The counts may wrap around. A
tensor has at most REGION * PROGRAMS bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.elementwise.triton_norm import store_norm
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

REGION = 16384  # bytes of the largest part of a tensor that one program handles
PROGRAMS = 512  # largest number of programs in a launch
EMPTY = 0x8000  # fills each 16 bits: -0 in bfloat16, or a tiny float32; summands with these bits are sent as 0
_WARPS = 8
_CLEARED = tl.constexpr(2048)  # inboxes are emptied in units of this many bytes, by wide stores
_EMPTY_16 = tl.constexpr(EMPTY - 2**16)
_EMPTY_32 = tl.constexpr(EMPTY * (2**16 + 1) - 2**32)


@dataclass(frozen=True)
class PeerBuffers:
    """The symmetric memory of a process group. `inboxes`, `outboxes` and `signals` point to one address per GPU."""

    rank: int
    size: int
    inboxes: int  # of 3 x size x PROGRAMS regions, initially EMPTY
    turns: Tensor  # int32 (2, PROGRAMS), initially 0: slot of the next call, units of _CLEARED bytes of the last
    outboxes: int  # of 2 x PROGRAMS regions
    signals: int  # of size x PROGRAMS int32 counters, initially 0
    counts: Tensor  # int32 (PROGRAMS,), initially 0: calls of `all_gather`


def all_reduce(x: Tensor, memory: PeerBuffers) -> Tensor:
    out = torch.empty_like(x)
    piece = REGION // x.element_size()
    inbox = (memory.inboxes, memory.turns, memory.rank)
    sizes = {"SIZE": memory.size, "PIECE": piece, "N_PROGRAMS": PROGRAMS}
    _all_reduce_kernel[(triton.cdiv(x.numel(), piece),)](x, out, x.numel(), *inbox, **sizes, num_warps=_WARPS)
    return out


def add_and_norm(
    x_ND: Tensor, part_ND: Tensor, weight_D: Tensor, eps: float, plus_one: bool, memory: PeerBuffers
) -> tuple[Tensor, Tensor]:
    """All-reduce, add and norm as `elementwise.triton_norm.add_rms_norm`, but with squares summed in another order.

    There are at most PROGRAMS rows of at most REGION bytes.
    """
    n, size = x_ND.shape
    block = triton.next_power_of_2(size)
    sum_ND, normed_ND = torch.empty_like(x_ND), torch.empty_like(x_ND, dtype=weight_D.dtype)
    inbox = (memory.inboxes, memory.turns, memory.rank)
    sizes = {"SIZE": memory.size, "PIECE": REGION // part_ND.element_size(), "N_PROGRAMS": PROGRAMS, "BLOCK": block}
    n_warps = _WARPS if block <= 4096 else 4  # 256 rows of 5,120: 13.0 us with 4 warps, 14.4 with 8
    tensors = (x_ND, part_ND, sum_ND, weight_D, normed_ND)
    _all_reduce_norm_kernel[(n,)](*tensors, size, eps, *inbox, PLUS_ONE=plus_one, **sizes, num_warps=n_warps)
    return sum_ND, normed_ND


def all_gather(x: Tensor, memory: PeerBuffers) -> Tensor:
    out = x.new_empty((memory.size, *x.shape))
    piece = REGION // x.element_size()
    outbox = (memory.outboxes, memory.signals, memory.counts, memory.rank)
    sizes = {"SIZE": memory.size, "PIECE": piece, "N_PROGRAMS": PROGRAMS}
    _all_gather_kernel[(triton.cdiv(x.numel(), piece),)](x, out, x.numel(), *outbox, **sizes, num_warps=_WARPS)
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
    """Return the float32 sum of this program's part over the GPUs. Only its first `n_inside` elements exist."""
    program = tl.program_id(0)
    IS_WIDE: tl.constexpr = x.dtype == tl.float32
    NUMBER: tl.constexpr = tl.int32 if IS_WIDE else tl.int16
    NONE: tl.constexpr = _EMPTY_32.value if IS_WIDE else _EMPTY_16.value
    N_BYTES: tl.constexpr = 4 if IS_WIDE else 2
    inboxes = inboxes_ptr.to(tl.pointer_type(tl.uint64))
    turn, n_stale = tl.load(turns_ptr + program), tl.load(turns_ptr + N_PROGRAMS + program)
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
        tl.store(pairs + place * (PIECE * N_BYTES // 4) + pair, nothing, mask=pair // (_CLEARED // 4) < n_stale)
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
    tl.debug_barrier()  # every warp has read the turn; for short rows, the sums above do not synchronise warps
    tl.store(turns_ptr + program, (turn + 1) % 3)
    tl.store(turns_ptr + N_PROGRAMS + program, tl.cdiv(n_inside * N_BYTES, _CLEARED))
    return total


@kernel
def _all_reduce_kernel(
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
    first, lane = tl.program_id(0) * PIECE, tl.arange(0, PIECE)
    inside = first + lane < n
    x = load_masked(x_ptr + first + lane, inside)
    total = _sum_of_all(
        x, lane, inside, tl.minimum(n - first, PIECE), inboxes_ptr, turns_ptr, rank, SIZE, PIECE, N_PROGRAMS
    )
    tl.store(out_ptr + first + lane, total, mask=inside)


@kernel
def _all_reduce_norm_kernel(
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
    column = tl.arange(0, BLOCK)
    inside = column < size
    index = program_id_64(0) * size + column
    part = load_masked(part_ptr + index, inside)
    x = load_fp32(x_ptr + index, inside)
    weight = load_fp32(weight_ptr + column, inside)
    total = _sum_of_all(part, column, inside, size, inboxes_ptr, turns_ptr, rank, SIZE, PIECE, N_PROGRAMS)
    rounded = (x + total.to(part.dtype).to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + index, rounded, mask=inside)
    store_norm(normed_ptr + index, rounded.to(tl.float32), weight, inside, size, eps, PLUS_ONE)


@triton.jit
def _barrier(signals_ptr, program, count, rank, SIZE: tl.constexpr, N_PROGRAMS: tl.constexpr):
    """Signal that this program has written its part of call number `count`, and wait for the other GPUs."""
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
def _all_gather_kernel(
    x_ptr,
    out_ptr,
    n,
    outboxes_ptr,
    signals_ptr,
    counts_ptr,
    rank,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    N_PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    outboxes = outboxes_ptr.to(tl.pointer_type(tl.uint64))
    lane = tl.arange(0, PIECE)
    index = program * PIECE + lane
    inside = index < n
    place = ((count & 1) * N_PROGRAMS + program) * PIECE + lane
    mine = tl.multiple_of(tl.load(outboxes + rank).to(tl.pointer_type(tl.int32)), 16)
    tl.store(mine + place, load_masked(x_ptr + index, inside), mask=inside)
    _barrier(signals_ptr, program, count, rank, SIZE, N_PROGRAMS)
    for each in tl.static_range(SIZE):
        theirs = tl.multiple_of(tl.load(outboxes + each).to(tl.pointer_type(tl.int32)), 16)
        # Bypass the L1 cache, which may hold the data of the call before the last.
        found = tl.load(theirs + place, mask=inside, other=0, cache_modifier=".cg")
        tl.store(out_ptr + each * n + index, found, mask=inside)
    tl.store(counts_ptr + program, count)
