"""Sums over the GPUs of one machine through memory that each of them can read: torch's symmetric memory over NVLink.

A step of decoding sums small tensors, two for each layer, and the latency of a library for all sizes and networks would
be a large part of its time. Here each GPU reads the others' numbers itself, in one kernel that a CUDA graph can hold.
NVLink multicast is not used.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("areno")

_MOST_BYTES = 8 * 2**20  # of a tensor; NCCL is as fast for larger ones
_ONE_SHOT_BYTES = 2**20  # among more than two GPUs, larger tensors are cheaper in two steps
_ALIGNMENT = 16  # bytes


class PeerMemory:
    """A buffer on each GPU of a group, which the others have mapped."""

    def __init__(self, group: Any, device: torch.device):
        """A collective call. RuntimeError where the GPUs cannot read each other's memory."""
        import torch.distributed._symmetric_memory as symmetric_memory

        self.device = device
        self._size, self._name = dist.get_world_size(group), group.group_name
        self._buffer = symmetric_memory.empty(_MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._buffer, group)

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` can add this tensor."""
        fits = 0 < x.nbytes <= _MOST_BYTES and x.nbytes % _ALIGNMENT == 0
        return fits and x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float32)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, added in the order of the ranks; x stays as it is."""
        buffer = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        if self._size == 2 or x.nbytes <= _ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", self._name)
        buffer.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._name, torch.empty_like(x))


def open_peer_memory(group: Any, device: torch.device) -> PeerMemory | None:
    """A collective call: memory that has been tried, or None where some GPU of the group has none that works."""
    memory, problem = None, ""
    try:
        memory = PeerMemory(group, device)
    except (RuntimeError, ImportError, AttributeError) as error:  # torch's symmetric memory is no stable part of it
        problem = str(error).splitlines()[0]
    if _is_any(bool(problem), group, device):
        logger.info("decoding sums over NCCL: no memory shared between GPUs (%s)", problem or "on another rank")
        return None
    assert memory is not None
    wrong = [n_bytes for n_bytes in (_ALIGNMENT, _ONE_SHOT_BYTES, _MOST_BYTES) if not _is_right(memory, n_bytes, group)]
    if _is_any(bool(wrong), group, device):
        logger.warning("decoding sums over NCCL: over shared memory they are wrong (of %s bytes)", wrong)
        return None
    return memory


def _is_right(memory: PeerMemory, n_bytes: int, group: Any) -> bool:
    x = torch.randint(-4, 5, (n_bytes // 2,), device=memory.device).bfloat16()  # whose sums are exact
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    return torch.equal(memory.sum(x), expected)


def _is_any(here: bool, group: Any, device: torch.device) -> bool:
    """Whether it is true on any rank."""
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found, group=group)
    return bool(found.item())
