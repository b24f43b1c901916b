"""Keeps what layers save for the backward pass in host memory, for rows that are too long for a device.

On CUDA, copies run on streams of their own. In the forward pass, the tensors of a layer leave the device while the next
layer is computed. In the backward pass, those of a layer arrive while the layer after it is computed. The host waits
for nothing: all waiting is between streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 2**28
"""Bytes of pinned memory to allocate at once. torch rounds up to a power of two, which could double a large tensor."""
_ALIGN = 256  # bytes


@dataclass(slots=True)
class _HostCopy:
    shape: torch.Size
    dtype: torch.dtype
    parts: list[Tensor]  # bytes, in one or several blocks

    def parts_of(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (part in host memory, same part of `tensor`)."""
        return zip(self.parts, tensor.view(-1).view(torch.uint8).split(list(map(len, self.parts))), strict=True)


@dataclass(slots=True)
class _SavedLayer:
    tensors: list[Tensor | None]  # those on the device
    copies: dict[int, _HostCopy] = field(default_factory=dict)  # index of a tensor -> its copy
    copied: torch.cuda.Event | None = None  # the last copies, to host memory or back, are complete

    @property
    def is_away(self) -> bool:
        return any(self.tensors[index] is None for index in self.copies)


class ActivationOffload:
    """Saves the tensors of the layers of one pass, and returns them in the reverse order.

    `begin` starts a pass, in which the tensors of the first `n_offloaded` layers are copied to host memory. Those of
    the last one also stay on the device, because the backward pass needs them first. Host memory is kept for later
    passes.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._blocks: list[Tensor] = []
        self._n_used = 0  # bytes of the blocks
        self._layers: list[_SavedLayer] = []
        self._n_offloaded = 0
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # from and to the device

    @property
    def host_bytes(self) -> int:
        return BLOCK * len(self._blocks)

    def begin(self, n_offloaded: int) -> None:
        """Start a pass. The tensors of an earlier pass, which may have ended with an error, are dropped."""
        for stream in self._streams or ():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._layers, self._n_used, self._n_offloaded = [], 0, n_offloaded

    def save(self, tensors: Sequence[Tensor | None]) -> int:
        """Save the tensors of the next layer, which nothing may change, and return the index of the layer."""
        index, layer = len(self._layers), _SavedLayer(list(tensors))
        self._layers.append(layer)
        if index < self._n_offloaded:
            self._begin_copy_to_host(layer)
            if index:
                self._drop_from_device(self._layers[index - 1])
        return index

    def load(self, index: int) -> list[Tensor | None]:
        """Return the tensors of a layer, and begin to copy those of the layer before it to the device."""
        layer = self._layers[index]
        if layer.is_away:
            self._begin_copy_to_device(layer)
        self._wait_for_copies(layer)
        if index and self._layers[index - 1].is_away:
            self._begin_copy_to_device(self._layers[index - 1])
        self._layers[index] = _SavedLayer([])
        return layer.tensors

    @contextmanager
    def saving_input(self, x: Tensor) -> Iterator[None]:
        """Save x, the input of a layer, when `checkpoint` saves its arguments in the `with` block."""

        def pack(tensor: Tensor) -> Tensor | int:
            is_input = tensor.data_ptr() == x.data_ptr() and tensor.shape == x.shape
            return self.save([tensor]) if is_input else tensor

        def unpack(saved: Tensor | int) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            [tensor] = self.load(saved)
            assert tensor is not None
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _begin_copy_to_host(self, layer: _SavedLayer) -> None:
        for index, tensor in enumerate(layer.tensors):
            if tensor is not None and tensor.device == self._device and tensor.numel():
                tensor = layer.tensors[index] = tensor.contiguous()
                layer.copies[index] = _HostCopy(tensor.shape, tensor.dtype, self._allocate(tensor.nbytes))
        with self._copying(layer, 0):
            for index, copy in layer.copies.items():
                for in_host, on_device in copy.parts_of(layer.tensors[index]):  # type: ignore[arg-type]
                    in_host.copy_(on_device, non_blocking=True)

    def _drop_from_device(self, layer: _SavedLayer) -> None:
        self._wait_for_copies(layer)
        for index in layer.copies:
            layer.tensors[index] = None

    def _begin_copy_to_device(self, layer: _SavedLayer) -> None:
        # The memory is that of the current stream, which computes with it and frees it.
        for index, copy in layer.copies.items():
            layer.tensors[index] = torch.empty(copy.shape, dtype=copy.dtype, device=self._device)
        with self._copying(layer, 1):
            for index, copy in layer.copies.items():
                for in_host, on_device in copy.parts_of(layer.tensors[index]):  # type: ignore[arg-type]
                    on_device.copy_(in_host, non_blocking=True)

    def _allocate(self, n_bytes: int) -> list[Tensor]:
        """Return host memory for a tensor, which may continue in the next block."""
        parts: list[Tensor] = []
        while n_bytes:
            block, start = divmod(self._n_used, BLOCK)
            if block == len(self._blocks):
                pinned = self._device.type == "cuda"
                self._blocks.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned))
            parts.append(self._blocks[block][start : start + n_bytes])
            self._n_used += len(parts[-1])
            n_bytes -= len(parts[-1])
        self._n_used = -(-self._n_used // _ALIGN) * _ALIGN
        return parts

    @contextmanager
    def _copying(self, layer: _SavedLayer, direction: int) -> Iterator[None]:
        """Run the copies of a `with` block on one of the two streams, after all work of the current stream so far."""
        if self._device.type != "cuda":
            yield
            return
        if self._streams is None:
            self._streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield
            layer.copied = copied = torch.cuda.Event()
            copied.record(stream)

    def _wait_for_copies(self, layer: _SavedLayer) -> None:
        if layer.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(layer.copied)
