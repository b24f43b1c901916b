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
        self._params = [_HostCopy(buffer) for buffer in params]
        self._state = [_HostCopy(buffer) for buffer in state]
        self._scratch = [(buffer.untyped_storage(), buffer.untyped_storage().nbytes()) for buffer in scratch]
        for copy in (*self._params, *self._state):
            copy.leave(changed=True)
        for storage, _ in self._scratch:
            storage.resize_(0)

    @contextmanager
    def on_device(self, training: bool = False) -> Iterator[None]:
        """Within it the buffers hold what they held; without `training` only `params` do, and must not be changed."""
        copies = [*self._params, *(self._state if training else ())]
        arrived: list[_HostCopy] = []
        try:
            for copy in copies:
                copy.arrive()
                arrived.append(copy)
            if training:
                for storage, n_bytes in self._scratch:
                    storage.resize_(n_bytes)
            yield
        finally:  # also where memory ran out: what had come must leave again
            for copy in arrived:
                copy.leave(changed=training)
            for storage, _ in self._scratch:
                storage.resize_(0)


class _HostCopy:
    """One buffer and its place in host memory, pinned where the device is CUDA.

    All copies run on the current stream, as what reads and writes the buffer does, so nothing here needs to wait.
    """

    def __init__(self, buffer: Tensor):
        self._buffer = buffer
        self._storage = buffer.untyped_storage()
        self._n_bytes = self._storage.nbytes()
        n = CHUNK_BYTES // buffer.element_size()
        self._places = [slice(start, start + n) for start in range(0, buffer.numel(), n)]
        self._chunks = [
            torch.empty(buffer[place].shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda) for place in self._places
        ]

    def arrive(self) -> None:
        """Back to the device."""
        self._storage.resize_(self._n_bytes)
        for place, chunk in zip(self._places, self._chunks, strict=True):
            self._buffer[place].copy_(chunk, non_blocking=True)

    def leave(self, changed: bool) -> None:
        """Off the device; what did not change is in host memory already."""
        if changed:
            for place, chunk in zip(self._places, self._chunks, strict=True):
                chunk.copy_(self._buffer[place], non_blocking=True)
        self._storage.resize_(0)
