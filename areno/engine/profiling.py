"""Profiles of one rank: times of its phases on the device, kernels by torch.profiler, snapshots of the device memory.

`phase` records the work of the device, such as the forward pass of a micro-batch, as an event of the trace lane "rank
N/device". On a GPU, CUDA events measure the times, because the host only launches kernels and runs ahead. An anchor, a
CUDA event whose time on the host is known, converts them to times of the host. Importing this module does not import
torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from areno import trace
from areno.specs.engine import ProfilingSpec

logger = logging.getLogger("areno")

_MOST_SNAPSHOTS = 4  # of a rank that runs out of memory: each takes seconds and may take gigabytes
_OFF = nullcontext()


class DeviceClock:
    """Measures how long the device of one rank spends in each phase, for the trace."""

    def __init__(self, rank: int, device: Any):
        self._lane, self._on_cuda = f"rank {rank}/device", device.type == "cuda"
        self._anchor: tuple[Any, int] | None = None  # (CUDA event, its time on the host)
        # (name, event before, event after, anchor, arguments) of phases whose times are not read yet
        self._open: list[tuple[str, Any, Any, tuple[Any, int], Mapping[str, Any]]] = []

    def set_anchor(self) -> None:
        """Record a CUDA event together with the host's time, to convert the times of other events to host time.

        Waits until the device is idle, so call this method where the device has little to do. Call the method
        repeatedly, because the clocks of host and device drift apart.
        """
        if not self._on_cuda:
            return
        import torch

        self.record_finished_phases()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        self._anchor = event, trace.now()

    @contextmanager
    def measure(self, name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        if not self._on_cuda:
            with trace.span(self._lane, name, **arguments):
                yield
            return
        import torch

        if self._anchor is None:
            self.set_anchor()
        assert self._anchor is not None
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._open.append((name, before, after, self._anchor, arguments))

    def record_finished_phases(self) -> None:
        """Add the phases that the device has finished to the trace. Does not wait for unfinished phases."""
        n_done = 0
        for name, before, after, (anchor, anchored_at), arguments in self._open:
            if not after.query():
                break
            start, end = (anchored_at + int(anchor.elapsed_time(event) * 1e6) for event in (before, after))
            trace.add(self._lane, name, start, end, **arguments)
            n_done += 1
        del self._open[:n_done]


_clock: DeviceClock | None = None


def phase(name: str, **arguments: Any) -> AbstractContextManager[None]:
    """Return a context manager that records the work of the device in its `with` block, if the rank is traced."""
    if _clock is None or not trace.active:
        return _OFF
    return _clock.measure(name, arguments)


def set_anchor() -> None:
    if _clock is not None and trace.active:
        _clock.set_anchor()


def record_finished_phases() -> None:
    if _clock is not None and trace.active:
        _clock.record_finished_phases()


class Profiler:
    def __init__(self, spec: ProfilingSpec | None, rank: int, device: Any):
        global _clock
        self._spec, self._rank, self._device = spec, rank, device
        self._profile: Any = None
        self._n_out_of_memory = 0
        _clock = None
        if spec is None:
            return
        if spec.events:
            trace.begin()
            _clock = DeviceClock(rank, device)
        if spec.memory_entries is not None and device.type == "cuda":
            self._record_memory(spec.memory_entries)

    def _record_memory(self, entries: int) -> None:
        """Let torch's allocator keep its last `entries` events, and write a snapshot when memory runs out."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=entries)
        torch._C._cuda_attach_out_of_memory_observer(self._on_out_of_memory)  # type: ignore[attr-defined]

    def _on_out_of_memory(self, *_: Any) -> None:
        """Write a snapshot. torch calls this before it raises the error, while all tensors are alive."""
        self._n_out_of_memory += 1
        if self._n_out_of_memory <= _MOST_SNAPSHOTS:
            with suppress(Exception):  # the error of the allocation says more
                self.write_snapshot(f"out-of-memory-{self._n_out_of_memory}")

    def write_snapshot(self, name: str) -> None:
        """Write a snapshot for https://docs.pytorch.org/memory_viz, as <folder>/memory-<name>-rank<N>.pickle."""
        import torch

        assert self._spec is not None
        path = Path(self._spec.folder) / f"memory-{name}-rank{self._rank}.pickle"
        try:
            torch.cuda.memory._dump_snapshot(str(path))
            logger.info("worker %d: snapshot of the device memory in %s", self._rank, path)
        except OSError as error:
            logger.warning("worker %d: the snapshot %s was not written: %s", self._rank, path, error)

    def begin_kernel_profile(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self._device)  # kernels of the step before are not of this one
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * on_cuda)])
        self._profile.start()

    def end_kernel_profile(self, name: str) -> None:
        """Write what was recorded since `begin_kernel_profile` to <folder>/kernels-<name>-rank<N>.json.gz."""
        found, self._profile = self._profile, None
        if found is None or self._spec is None:
            return
        found.stop()
        path = Path(self._spec.folder) / f"kernels-{name}-rank{self._rank}.json.gz"
        try:
            found.export_chrome_trace(str(path))
        except OSError as error:
            logger.warning("worker %d: the profile %s was not written: %s", self._rank, path, error)

    def close(self) -> None:
        """Stop a running kernel profile without writing it. A process that exits while it is profiled may crash."""
        found, self._profile = self._profile, None
        if found is not None:
            found.stop()
