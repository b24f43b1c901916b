"""Memory of the GPUs of one machine that all of them reach (torch's symmetric memory over NVLink), for small tensors.

A step of decoding sums small tensors, two for each layer, and the latency of a library for all sizes and networks
would be a large part of its time. Here each GPU writes its numbers to the others itself, or reads theirs, in one
kernel that a CUDA graph can hold. NVLink multicast is not used.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("areno")

_ONE_SHOT_BYTES = 2**20  # among more than two GPUs, larger tensors are cheaper in two steps
_TWO_STEPS = (4, 8)  # sizes of a group, above two, that torch has them for
_ALIGNMENT = 16  # bytes


class SymmetricMemory:
    """A buffer on each GPU of a group, which the others have mapped."""

    def __init__(self, group: Any, device: torch.device):
        """Only takes the memory. RuntimeError where there is none, ImportError without Triton."""
        import torch.distributed._symmetric_memory as symmetric_memory

        from areno.kernels.symmetric_memory import triton as kernels
        from areno.kernels.symmetric_memory.triton import EMPTY, PROGRAMS, REGION

        self.device, self._kernels, self._most_rows, self._row_bytes = device, kernels, PROGRAMS, REGION
        self._group, self._size = group, dist.get_world_size(group)
        self.most_bytes = REGION * PROGRAMS  # of a tensor; NCCL is as fast for larger ones

        def empty(n: int, dtype: torch.dtype) -> Tensor:
            return symmetric_memory.empty(n, dtype=dtype, device=device)

        # torch would make multicast objects, which nothing here uses, and fail on machines that have them in name only.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._inbox = empty(3 * self._size * self.most_bytes // 2, torch.int16).fill_(EMPTY - 2**16)
        self._shown = empty(2 * self.most_bytes, torch.uint8)
        self._signals = empty(self._size * PROGRAMS, torch.int32).zero_()
        self._most_summed = self.most_bytes if self._size in (2, *_TWO_STEPS) else _ONE_SHOT_BYTES
        # What torch's two steps work in.
        self._whole = empty(self.most_bytes, torch.uint8) if self._size in _TWO_STEPS else None

    def connect(self) -> None:
        """A collective call. RuntimeError where the GPUs cannot read each other's memory."""
        import torch.distributed._symmetric_memory as symmetric_memory

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        inboxes, shown, signals = (
            symmetric_memory.rendezvous(each, self._group).buffer_ptrs_dev
            for each in (self._inbox, self._shown, self._signals)
        )
        self._shared = self._kernels.Shared(
            rank=dist.get_rank(self._group), size=self._size, inboxes=inboxes, turns=zeros(2, self._most_rows),
            shown=shown, signals=signals, counts=zeros(self._most_rows),
        )  # fmt: skip
        if self._whole is not None:
            symmetric_memory.rendezvous(self._whole, self._group)

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` can add this tensor."""
        is_aligned = x.nbytes % _ALIGNMENT == 0  # for torch's two steps
        fits = is_aligned and self._fits(x) and x.nbytes <= self._most_summed
        return fits and x.dtype in (torch.bfloat16, torch.float32)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; x stays as it is.

        Added in float32 in the order of the ranks; torch's two steps round to the dtype of x after each.
        """
        if self._whole is None or x.nbytes <= _ONE_SHOT_BYTES:
            return self._kernels.add(x, self._shared)
        buffer = self._whole[: x.nbytes].view(x.dtype).view(x.shape)
        buffer.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._group.group_name, torch.empty_like(x))

    def takes_rows(self, n: int, size: int, dtype: torch.dtype) -> bool:
        """Whether `add_and_norm` can take n rows of this size."""
        return 0 < n <= self._most_rows and size * dtype.itemsize <= self._row_bytes and dtype == torch.bfloat16

    def add_and_norm(
        self, x_ND: Tensor, part_ND: Tensor, weight_D: Tensor, eps: float, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """x + the sum of `part` over the ranks, and its norm: what adding the result of `sum` would give."""
        assert part_ND.dtype == torch.bfloat16, "rows that a region may not hold"
        return self._kernels.add_and_norm(x_ND, part_ND.contiguous(), weight_D, eps, plus_one, self._shared)

    def takes_all(self, x: Tensor) -> bool:
        """Whether `gather` can take this tensor."""
        return self._fits(x) and x.dim() > 0 and x.shape[-1] * x.element_size() % 4 == 0

    def gather(self, x: Tensor) -> Tensor:
        """(size, *x.shape): x of each rank."""
        return self._kernels.gather(x.view(torch.int32), self._shared).view(x.dtype)

    def _fits(self, x: Tensor) -> bool:
        return 0 < x.nbytes <= self.most_bytes and x.is_contiguous()


def open_symmetric_memory(group: Any, device: torch.device) -> SymmetricMemory | None:
    """A collective call: memory that has been tried, or None where some GPU of the group has none that works."""
    found: list[SymmetricMemory] = []
    # A rank that has no memory must not leave the others waiting for it to connect.
    for step in (lambda: found.append(SymmetricMemory(group, device)), lambda: found[0].connect()):
        has_failed, problem = False, "on another rank"
        try:
            step()
        except (RuntimeError, ImportError, AttributeError) as error:  # torch's symmetric memory is no stable part of it
            has_failed, problem = True, (str(error).strip() or type(error).__name__).splitlines()[0]
        if _is_any(has_failed, group, device):
            logger.info("decoding sums over NCCL: no memory shared between GPUs (%s)", problem)
            return None
    [memory] = found
    sizes = (_ALIGNMENT, _ONE_SHOT_BYTES, memory.most_bytes)
    # Other numbers on each rank and each time: else what is there already would be right, too.
    generator = torch.Generator(device).manual_seed(dist.get_rank(group))
    # Four times each: sums take turns in three places, which are emptied in between.
    wrong = [n_bytes for n_bytes in sizes for _ in range(4) if not _is_right(memory, n_bytes, group, generator)]
    if _is_any(bool(wrong), group, device):
        logger.warning("decoding sums over NCCL: over shared memory they are wrong (of %s bytes)", wrong)
        return None
    return memory


def _is_right(memory: SymmetricMemory, n_bytes: int, group: Any, generator: torch.Generator) -> bool:
    """A collective call."""
    x = torch.randint(-4, 5, (n_bytes // 2,), generator=generator, device=memory.device).bfloat16()  # sums are exact
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    every = memory.gather(x)
    summed = memory.sum(x) if memory.takes(x) else expected
    return torch.equal(summed, expected) and torch.equal(every.sum(0), expected)


def _is_any(here: bool, group: Any, device: torch.device) -> bool:
    """Whether it is true on any rank."""
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found, group=group)
    return bool(found.item())
