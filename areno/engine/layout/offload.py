"""The buffers of a model that rests in host memory while it is not used.

A buffer leaves the device by its storage, which is freed and later allocated again under the same tensors: parameters
and gradients, which are views of it, never notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Bytes of pinned memory taken at once. torch rounds up to a power of two, which would waste half of a large buffer.
CHUNK_BYTES = 2**28


class Offload:
    """Moves a model's flat buffers to the device while they are used. Construction moves them off it.

    params: what every use needs. state: what training needs beside it (fp32 masters, Adam moments) and changes.
    scratch: what training needs and nobody reads afterwards (gradients); it comes back with any content.
    """

    def __init__(self, params: Sequence[Tensor], state: Sequence[Tensor] = (), scratch: Sequence[Tensor] = ()):
        self._params = [_Buffer(buffer) for buffer in params]
        self._state = [
            *(_Buffer(buffer) for buffer in state),
            *(_Buffer(buffer, scratch=True) for buffer in scratch),
        ]
        for buffer in (*self._params, *self._state):
            buffer.leave(changed=True)

    @contextmanager
    def on_device(self, training: bool = False) -> Iterator[None]:
        """Within it the buffers hold what they held; without `training` only `params` do, and must not be changed."""
        arrived: list[_Buffer] = []
        try:
            for buffer in (*self._params, *(self._state if training else ())):
                buffer.arrive()
                arrived.append(buffer)
            yield
        finally:  # also where memory ran out: what had come must leave again
            for buffer in arrived:
                buffer.leave(changed=training)

    def at_rest(self, buffer: Tensor) -> list[Tensor]:
        """The parts, one after another, of a buffer that rests in host memory; none for one that never left.

        On CUDA the copies to them may still be under way.
        """
        found = (each for each in (*self._params, *self._state) if each.holds(buffer))
        return [copy for each in found for copy in each.copies]


class _Buffer:
    """One buffer and its place in host memory, pinned where the device is CUDA; scratch has no such place.

    All copies run on the current stream, as what reads and writes the buffer does, so nothing here needs to wait.
    """

    def __init__(self, buffer: Tensor, scratch: bool = False):
        self._storage = buffer.untyped_storage()
        self._n_bytes = self._storage.nbytes()
        n = CHUNK_BYTES // buffer.element_size()
        parts = [buffer[start : start + n] for start in range(0, 0 if scratch else buffer.numel(), n)]
        self._copies = [(part, torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)) for part in parts]

    @property
    def copies(self) -> list[Tensor]:
        return [copy for _, copy in self._copies]

    def holds(self, buffer: Tensor) -> bool:
        return buffer.untyped_storage()._cdata == self._storage._cdata

    def arrive(self) -> None:
        """Back to the device."""
        self._storage.resize_(self._n_bytes)
        for part, copy in self._copies:
            part.copy_(copy, non_blocking=True)

    def leave(self, changed: bool) -> None:
        """Off the device; what did not change is in host memory already."""
        if changed:
            for part, copy in self._copies:
                copy.copy_(part, non_blocking=True)
        self._storage.resize_(0)
