"""Keeps master weights and moments in host memory, and streams them through the device in an optimizer update.

A `HostBuffer` replaces a tensor on the device. `StateStream` copies a window of all buffers to the device, lets the
optimizer update the window there, and copies the window back. On CUDA, the copies of other windows run in both
directions at the same time as an update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from areno.cost.memory import WINDOW, WINDOWS
from areno.kernels.adam import BLOCK

PINNED_BYTES = 2**28
"""Bytes of pinned memory to allocate at once. torch rounds up to a power of two, which could double a large tensor."""

PART = PINNED_BYTES // 4
"""Elements in a part of a HostBuffer. A multiple of WINDOW, so that each window lies in one part."""


class HostBuffer:
    """A one-dimensional tensor in host memory, which is allocated in parts.

    torch rounds pinned memory up to a power of two bytes. All parts but the last have such a size. With `per_block`,
    the buffer has one element for every BLOCK parameters instead of one for each.
    """

    def __init__(self, n: int, dtype: torch.dtype, *, pinned: bool, per_block: bool = False):
        self.dtype, self.device = dtype, torch.device("cpu")
        self.per_block, self.part_size = per_block, PART // BLOCK if per_block else PART
        sizes = [min(self.part_size, n - start) for start in range(0, n, self.part_size)]
        self.parts = [torch.empty(size, dtype=dtype, pin_memory=pinned).zero_() for size in sizes]

    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, place: slice) -> Tensor:
        """Return a view of a range of elements, which must lie within one part."""
        [piece] = self.range_views(place)
        return piece

    def range_views(self, place: slice) -> list[Tensor]:
        size, found = self.part_size, []
        for number in range(place.start // size, -(-place.stop // size)):
            start = number * size
            found.append(self.parts[number][max(place.start - start, 0) : place.stop - start])
        return found

    def fill_(self, value: float) -> HostBuffer:
        for part in self.parts:
            part.fill_(value)
        return self

    def zero_(self) -> HostBuffer:
        return self.fill_(0)


Buffer = Tensor | HostBuffer
"""A flat buffer on the device or in host memory."""


def buffer_range_views(buffer: Buffer, place: slice) -> list[Tensor]:
    return buffer.range_views(place) if isinstance(buffer, HostBuffer) else [buffer[place]]


def block_range(place: slice) -> slice:
    """Convert a range of elements, which starts at a multiple of BLOCK, to the range of their 8-bit blocks."""
    return slice(place.start // BLOCK, -(-place.stop // BLOCK))


def split_at_parts(place: slice) -> Iterator[slice]:
    """Split a range of elements at the borders between the parts of a HostBuffer."""
    start = place.start
    while start < place.stop:
        stop = min(place.stop, (start // PART + 1) * PART)
        yield slice(start, stop)
        start = stop


@dataclass(frozen=True)
class UpdateWindow:
    """A range of elements whose masters and moments are on the device, so that they can be updated.

    All slices are indices into the whole buffer of master weights. A slice for `scales` must start at a multiple of
    BLOCK.
    """

    place: slice
    buffers: dict[str, Tensor]

    def state(self, name: str, local: slice) -> Tensor:
        return self.buffers[name][self._in_window(local)]

    def scales(self, name: str, local: slice) -> Tensor:
        return self.buffers[name][block_range(self._in_window(local))]

    def _in_window(self, local: slice) -> slice:
        return slice(local.start - self.place.start, local.stop - self.place.start)


Streams = tuple[torch.cuda.Stream, torch.cuda.Stream] | None
"""Streams for copies to the device and to host memory. None on a CPU."""


class StateStream:
    """Copies master weights and moments to the device for an update, one window after another.

    Buffers that are on the device are used in place. If all buffers are there, one window covers everything.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: Streams = None

    def windows(self, buffers: Mapping[str, Buffer], n: int) -> Iterator[UpdateWindow]:
        """Yield windows in ascending order. A window is copied back when the next one is requested.

        On CUDA, the host waits for nothing: all waiting is between streams. After the last window, the current stream
        waits for all copies to host memory.
        """
        hosted = {name: buffer for name, buffer in buffers.items() if isinstance(buffer, HostBuffer)}
        if not hosted or not n:
            yield UpdateWindow(
                slice(0, n), {name: buffer for name, buffer in buffers.items() if isinstance(buffer, Tensor)}
            )
            return
        on_cuda = self._device.type == "cuda"
        if on_cuda and self._streams is None:
            self._streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        places = [slice(start, min(start + WINDOW, n)) for start in range(0, n, WINDOW)]
        slots = [_DeviceWindow(hosted, min(WINDOW, n), self._device) for _ in places[:WINDOWS]]
        current = torch.cuda.current_stream(self._device) if on_cuda else None
        if current is not None and self._streams is not None:
            self._streams[0].wait_stream(current)  # earlier work may still use the memory of the slots
        try:
            for number, place in enumerate(places):
                slot = slots[number % len(slots)]
                loaded = slot.load(place, self._streams)
                others = {name: buffer[place] for name, buffer in buffers.items() if isinstance(buffer, Tensor)}
                yield UpdateWindow(place, loaded | others)
                slot.store(self._streams)
        finally:  # before the memory of the slots is used for something else
            if current is not None and self._streams is not None:
                for stream in self._streams:
                    current.wait_stream(stream)


class _DeviceWindow:
    """Device memory for one window of the buffers in host memory."""

    def __init__(self, hosted: Mapping[str, HostBuffer], n: int, device: torch.device):
        self._hosted, self._device = hosted, device
        self._memory = {
            name: torch.empty(_buffer_range(slice(0, n), buffer).stop, dtype=buffer.dtype, device=device)
            for name, buffer in hosted.items()
        }
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (in host memory, on the device) of the window
        self._stored: torch.cuda.Event | None = None

    def load(self, place: slice, streams: Streams) -> dict[str, Tensor]:
        """Start to copy a window to the device. The current stream waits for the copies."""
        loaded: dict[str, Tensor] = {}
        self._pairs = []
        for name, buffer in self._hosted.items():
            of_buffer = _buffer_range(place, buffer)
            if of_buffer.start >= of_buffer.stop:
                continue
            loaded[name] = self._memory[name][: of_buffer.stop - of_buffer.start]
            self._pairs.append((buffer[of_buffer], loaded[name]))
        if streams is not None and self._stored is not None:
            streams[0].wait_event(self._stored)  # the window that was here before is still being stored
        with _on_stream(None if streams is None else streams[0]):
            for in_host, on_device in self._pairs:
                on_device.copy_(in_host, non_blocking=True)
        if streams is not None:
            torch.cuda.current_stream(self._device).wait_stream(streams[0])
        return loaded

    def store(self, streams: Streams) -> None:
        """Start to copy the window back to host memory, after the work that the current stream has so far."""
        if streams is not None:
            streams[1].wait_stream(torch.cuda.current_stream(self._device))
        with _on_stream(None if streams is None else streams[1]):
            for in_host, on_device in self._pairs:
                in_host.copy_(on_device, non_blocking=True)
            if streams is not None:
                self._stored = torch.cuda.Event()
                self._stored.record(streams[1])


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _buffer_range(place: slice, buffer: HostBuffer) -> slice:
    """Return where a buffer has a range of parameters: by elements or blocks, and only the first ones for some."""
    place = block_range(place) if buffer.per_block else place
    return slice(place.start, min(place.stop, buffer.numel()))
