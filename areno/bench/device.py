"""The device itself: how fast it copies and multiplies, and how much of its memory is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch

from areno.bench.floors import Rates

_GIB = 2**30


def synchronize(device: str) -> None:
    """Wait for what this process gave the device to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def device_name(device: str) -> str:
    """The GPU's name, or the number of CPU threads in use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def measured_rates(device: str, dtype: torch.dtype) -> Rates:
    """The best of several copies of a buffer no cache holds, and of several square matmuls. A second or two."""
    rates = Rates(copy_bytes_s=_copy_bytes_s(device), matmul_flops_s=_matmul_flops_s(device, dtype))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return rates


def _copy_bytes_s(device: str) -> float:
    cuda = device.startswith("cuda")
    source = torch.zeros(_GIB if cuda else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _best_s(lambda: target.copy_(source), device, times=20 if cuda else 2)
    return 2.0 * source.numel() / seconds  # read and written


def _matmul_flops_s(device: str, dtype: torch.dtype) -> float:
    cuda = device.startswith("cuda")
    size = 8192 if cuda else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    return 2.0 * size**3 / _best_s(lambda: torch.mm(left, right, out=out), device, times=20 if cuda else 2)


def _best_s(body: Callable[[], object], device: str, times: int, rounds: int = 5) -> float:
    """Seconds of one call: the best round of `times` calls each, after one to warm up."""
    best = float("inf")
    for turn in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(times):
            body()
        synchronize(device)
        if turn:
            best = min(best, (time.perf_counter() - started) / times)
    return best


class MemoryWatch:
    """Peak memory of the whole CUDA device while entered, whoever takes it; `peak_gib` is None where none is watched.

    What a process's allocator keeps counts here, unlike in its own peak of what it handed out. on: False watches
    nothing, for work in this very process, which may be capturing CUDA graphs.
    """

    def __init__(self, device: str, *, on: bool = True, every_s: float = 0.05):
        self._device, self._every_s = device, every_s
        self._on = on and device.startswith("cuda")
        self._peak = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def peak_gib(self) -> float | None:
        return self._peak / _GIB if self._peak else None

    def __enter__(self) -> MemoryWatch:
        if self._on:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="areno-memory-watch")
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            free, total = torch.cuda.mem_get_info(self._device)
            self._peak = max(self._peak, total - free)
            self._done.wait(self._every_s)
