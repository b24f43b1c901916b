"""Small collectives between the GPUs of one machine through torch's symmetric memory over NVLink.

A decode step sums two small tensors for each layer, and NCCL's latency would be a large part of its time. Here a GPU
writes its numbers into the memory of the others, or reads theirs, in one kernel that a CUDA graph can capture. NVLink
multicast is not used. `open_symmetric_memory` opens and tests the memory of a process group.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("areno")

_ONE_SHOT_BYTES = 2**20  # with more than two GPUs, a two-shot all-reduce is faster for larger tensors
_TWO_SHOT_SIZES = (4, 8)  # sizes of a group for which torch has a two-shot all-reduce
_ALIGNMENT = 16  # bytes


class SymmetricMemory:
    """Buffers on each GPU of a process group which the other GPUs can write and read.

    Created by `open_symmetric_memory`. `connect` has to be called before anything else.

    Args:
        group: the process group.
        device: the GPU of this rank.

    Attributes:
        device: the GPU of this rank.
        max_bytes: the size of the largest tensor; NCCL is as fast for larger ones.

    Raises:
        RuntimeError: the device has no symmetric memory.
        ImportError: Triton or torch's symmetric memory is missing.
    """

    def __init__(self, group: Any, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        from areno.kernels.symmetric_memory import triton as kernels
        from areno.kernels.symmetric_memory.triton import EMPTY, PROGRAMS, REGION

        self.device, self._kernels, self._max_rows, self._row_bytes = device, kernels, PROGRAMS, REGION
        self._group, self._size = group, dist.get_world_size(group)
        self.max_bytes = REGION * PROGRAMS

        def empty(n: int, dtype: torch.dtype) -> Tensor:
            return symmetric_memory.empty(n, dtype=dtype, device=device)

        # torch would create multicast objects, which are unused here and fail on some machines that report support.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._inbox = empty(3 * self._size * self.max_bytes // 2, torch.int16).fill_(EMPTY - 2**16)
        self._outboxes = empty(2 * self.max_bytes, torch.uint8)
        self._signals = empty(self._size * PROGRAMS, torch.int32).zero_()
        self._max_summed = self.max_bytes if self._size in (2, *_TWO_SHOT_SIZES) else _ONE_SHOT_BYTES
        # The buffer of torch's two-shot all-reduce.
        self._whole = empty(self.max_bytes, torch.uint8) if self._size in _TWO_SHOT_SIZES else None

    def connect(self) -> None:
        """Map the buffers of the other GPUs. A collective call.

        Raises:
            RuntimeError: the GPUs cannot access each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        inboxes, outboxes, signals = (
            symmetric_memory.rendezvous(each, self._group).buffer_ptrs_dev
            for each in (self._inbox, self._outboxes, self._signals)
        )
        self._shared = self._kernels.GroupMemory(
            rank=dist.get_rank(self._group),
            size=self._size,
            inboxes=inboxes,
            turns=zeros(2, self._max_rows),
            outboxes=outboxes,
            signals=signals,
            counts=zeros(self._max_rows),
        )
        if self._whole is not None:
            symmetric_memory.rendezvous(self._whole, self._group)

    def can_sum(self, x: Tensor) -> bool:
        """Return whether `all_reduce` accepts a tensor, by its size, dtype and alignment.

        Args:
            x: the tensor.
        """
        is_aligned = x.nbytes % _ALIGNMENT == 0  # for torch's two-shot all-reduce
        fits = is_aligned and self._fits(x) and x.nbytes <= self._max_summed
        return fits and x.dtype in (torch.bfloat16, torch.float32)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks. A collective call.

        Sums are in float32 in the order of the ranks. torch's two-shot all-reduce rounds to the dtype of x after each
        addition.

        Args:
            x: a contiguous tensor that `can_sum` accepts; unchanged.

        Returns:
            A new tensor in the shape and dtype of x.
        """
        if self._whole is None or x.nbytes <= _ONE_SHOT_BYTES:
            return self._kernels.all_reduce(x, self._shared)
        buffer = self._whole[: x.nbytes].view(x.dtype).view(x.shape)
        buffer.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._group.group_name, torch.empty_like(x))

    def can_add_and_norm(self, n: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether `add_and_norm` accepts rows of this size.

        Args:
            n: the number of rows.
            size: the elements of a row.
            dtype: their dtype.
        """
        return 0 < n <= self._max_rows and size * dtype.itemsize <= self._row_bytes and dtype == torch.bfloat16

    def add_and_norm(
        self, x_ND: Tensor, part_ND: Tensor, weight_D: Tensor, eps: float, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """Add the sum of `part` over the ranks to x, and return the sum and its RMS norm. A collective call.

        Args:
            x_ND: the residual stream, the same on all ranks.
            part_ND: this rank's summand, bfloat16, rows that `can_add_and_norm` accepts.
            weight_D: the weight of the norm.
            eps: the epsilon of the norm.
            plus_one: the factor of the norm is 1 + weight.

        Returns:
            The new residual stream (N, D) in the dtype of x, and its norm (N, D) in the dtype of the weight.
        """
        assert part_ND.dtype == torch.bfloat16, "rows that a region may not hold"
        return self._kernels.add_and_norm(x_ND, part_ND.contiguous(), weight_D, eps, plus_one, self._shared)

    def can_gather(self, x: Tensor) -> bool:
        """Return whether `all_gather` accepts a tensor, by its size and shape.

        Args:
            x: the tensor.
        """
        return self._fits(x) and x.dim() > 0 and x.shape[-1] * x.element_size() % 4 == 0

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x of each rank, (ranks, *x.shape). A collective call.

        Args:
            x: a contiguous tensor that `can_gather` accepts.
        """
        return self._kernels.all_gather(x.view(torch.int32), self._shared).view(x.dtype)

    def _fits(self, x: Tensor) -> bool:
        return 0 < x.nbytes <= self.max_bytes and x.is_contiguous()


def open_symmetric_memory(group: Any, device: torch.device) -> SymmetricMemory | None:
    """Open the symmetric memory of a process group, and test its results. A collective call.

    Args:
        group: the process group; all of its GPUs are in this machine.
        device: the GPU of this rank.

    Returns:
        The memory, or None if it does not work on some GPU of the group; the reason is logged.
    """
    found: list[SymmetricMemory] = []
    # All ranks agree after each step: a rank without memory must not let the others wait in `connect`.
    for step in (lambda: found.append(SymmetricMemory(group, device)), lambda: found[0].connect()):
        has_failed, problem = False, "on another rank"
        try:
            step()
        except (RuntimeError, ImportError, AttributeError) as error:  # torch's symmetric memory is not a stable API
            has_failed, problem = True, (str(error).strip() or type(error).__name__).splitlines()[0]
        if _is_any(has_failed, group, device):
            logger.info("decoding sums over NCCL: no memory shared between GPUs (%s)", problem)
            return None
    [memory] = found
    sizes = (_ALIGNMENT, _ONE_SHOT_BYTES, memory.max_bytes)
    # Other numbers on each rank and in each call, so that numbers of an earlier call would be wrong.
    generator = torch.Generator(device).manual_seed(dist.get_rank(group))
    # Four calls of each size: calls use three slots in turn, which are emptied in between.
    wrong = [n_bytes for n_bytes in sizes for _ in range(4) if not _is_right(memory, n_bytes, group, generator)]
    if _is_any(bool(wrong), group, device):
        logger.warning("decoding sums over NCCL: over shared memory they are wrong (of %s bytes)", wrong)
        return None
    return memory


def _is_right(memory: SymmetricMemory, n_bytes: int, group: Any, generator: torch.Generator) -> bool:
    """Return whether `all_reduce` and `all_gather` of random numbers are right. A collective call."""
    x = torch.randint(-4, 5, (n_bytes // 2,), generator=generator, device=memory.device).bfloat16()  # sums are exact
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    every = memory.all_gather(x)
    summed = memory.all_reduce(x) if memory.can_sum(x) else expected
    return torch.equal(summed, expected) and torch.equal(every.sum(0), expected)


def _is_any(here: bool, group: Any, device: torch.device) -> bool:
    """Return whether `here` is true on any rank. A collective call."""
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found, group=group)
    return bool(found.item())
