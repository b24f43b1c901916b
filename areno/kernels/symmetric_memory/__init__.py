"""Small collectives between the GPUs of one machine, through torch's symmetric memory over NVLink.

A decoding step sums two small tensors for each layer, and NCCL's latency would be a large part of its time. Here one
kernel, which a CUDA graph can capture, writes data into the memory of the other GPUs or reads data from it. NVLink
multicast is not used. All ranks of the group must make the same calls. Inputs must be contiguous; results are new.
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
    """Collectives through buffers on each GPU of a process group, which all GPUs of the group can read and write.

    `open_symmetric_memory` creates an object that is ready for use. After the constructor, `connect` has to be called.
    The constructor raises RuntimeError or ImportError if symmetric memory or Triton is missing. `all_gather` takes at
    most `max_bytes`, as NCCL is as fast for larger tensors.
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

        # Without this, torch creates multicast objects. They are unused here, and creating them fails on some machines
        # that report support.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._inbox = empty(3 * self._size * self.max_bytes // 2, torch.int16).fill_(EMPTY - 2**16)
        self._outboxes = empty(2 * self.max_bytes, torch.uint8)
        self._signals = empty(self._size * PROGRAMS, torch.int32).zero_()
        self._max_summed = self.max_bytes if self._size in (2, *_TWO_SHOT_SIZES) else _ONE_SHOT_BYTES
        # The buffer of torch's two-shot all-reduce.
        self._whole = empty(self.max_bytes, torch.uint8) if self._size in _TWO_SHOT_SIZES else None

    def connect(self) -> None:
        """Map the other GPUs' buffers into this process. Raises RuntimeError if the GPUs cannot access them."""
        import torch.distributed._symmetric_memory as symmetric_memory

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        inboxes, outboxes, signals = (
            symmetric_memory.rendezvous(each, self._group).buffer_ptrs_dev
            for each in (self._inbox, self._outboxes, self._signals)
        )
        self._shared = self._kernels.PeerBuffers(
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

    def can_all_reduce(self, x: Tensor) -> bool:
        """Return whether `all_reduce` accepts a tensor of this size, dtype and alignment."""
        is_aligned = x.nbytes % _ALIGNMENT == 0  # for torch's two-shot all-reduce
        fits = is_aligned and self._fits(x) and x.nbytes <= self._max_summed
        return fits and x.dtype in (torch.bfloat16, torch.float32)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks.

        Sums are in float32, in the order of the ranks. Large tensors in a group of 4 or 8 GPUs use torch's two-shot
        all-reduce instead, which rounds to the dtype of x after each addition.
        """
        if self._whole is None or x.nbytes <= _ONE_SHOT_BYTES:
            return self._kernels.all_reduce(x, self._shared)
        buffer = self._whole[: x.nbytes].view(x.dtype).view(x.shape)
        buffer.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._group.group_name, torch.empty_like(x))

    def can_add_and_norm(self, n: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether `add_and_norm` accepts n rows of this size and dtype."""
        return 0 < n <= self._max_rows and size * dtype.itemsize <= self._row_bytes and dtype == torch.bfloat16

    def add_and_norm(
        self, x_ND: Tensor, part_ND: Tensor, weight_D: Tensor, eps: float, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """All-reduce a layer's output `part_ND`, add it to the residual stream x, and return the stream and its norm.

        The stream has the dtype of x and is the same on all ranks. The RMS norm has the dtype of the weight.
        """
        assert part_ND.dtype == torch.bfloat16, "rows that a region may not hold"
        return self._kernels.add_and_norm(x_ND, part_ND.contiguous(), weight_D, eps, plus_one, self._shared)

    def can_gather(self, x: Tensor) -> bool:
        return self._fits(x) and x.dim() > 0 and x.shape[-1] * x.element_size() % 4 == 0

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors x of all ranks, (ranks, *x.shape)."""
        return self._kernels.all_gather(x.view(torch.int32), self._shared).view(x.dtype)

    def _fits(self, x: Tensor) -> bool:
        return 0 < x.nbytes <= self.max_bytes and x.is_contiguous()


def open_symmetric_memory(group: Any, device: torch.device) -> SymmetricMemory | None:
    """Open the symmetric memory of a process group, and test it.

    If it does not work on some GPU of the group, the reason is logged, and every rank gets None.
    """
    found: list[SymmetricMemory] = []
    # All ranks agree after each step. If one rank failed, the other ranks would otherwise wait for it in `connect`.
    for step in (lambda: found.append(SymmetricMemory(group, device)), lambda: found[0].connect()):
        has_failed, problem = False, "on another rank"
        try:
            step()
        except (RuntimeError, ImportError, AttributeError) as error:  # torch's symmetric memory is not a stable API
            has_failed, problem = True, (str(error).strip() or type(error).__name__).splitlines()[0]
        if _is_true_on_any_rank(has_failed, group, device):
            logger.info("decoding sums over NCCL: no memory shared between GPUs (%s)", problem)
            return None
    [memory] = found
    sizes = (_ALIGNMENT, _ONE_SHOT_BYTES, memory.max_bytes)
    # Random data differ on each rank and in each call, so the test notices data left from an earlier call.
    generator = torch.Generator(device).manual_seed(dist.get_rank(group))
    # Four calls of each size: calls use three slots in turn, so the fourth uses a slot that was emptied.
    wrong = [
        n_bytes for n_bytes in sizes for _ in range(4) if not _are_collectives_right(memory, n_bytes, group, generator)
    ]
    if _is_true_on_any_rank(bool(wrong), group, device):
        logger.warning("decoding sums over NCCL: over shared memory they are wrong (of %s bytes)", wrong)
        return None
    return memory


def _are_collectives_right(memory: SymmetricMemory, n_bytes: int, group: Any, generator: torch.Generator) -> bool:
    """Return whether `all_reduce` and `all_gather` of a random tensor of `n_bytes` bytes are right on this rank."""
    x = torch.randint(-4, 5, (n_bytes // 2,), generator=generator, device=memory.device).bfloat16()  # sums are exact
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    every = memory.all_gather(x)
    summed = memory.all_reduce(x) if memory.can_all_reduce(x) else expected
    return torch.equal(summed, expected) and torch.equal(every.sum(0), expected)


def _is_true_on_any_rank(here: bool, group: Any, device: torch.device) -> bool:
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found, group=group)
    return bool(found.item())
