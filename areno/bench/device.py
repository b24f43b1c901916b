"""The device itself: how fast it copies and multiplies, and how much of its memory is taken."""

from __future__ import annotations

import threading
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    cuda = device.startswith("cuda")
    times, size = (20, 8192) if cuda else (2, 1024)
    source = torch.zeros(_GIB if cuda else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device, times)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    matmul_s = _best_s(lambda: torch.mm(left, right, out=out), device, times)
    copied = 2.0 * source.numel()  # read and written
    rates = Rates(copy_bytes_s=copied / copy_s, matmul_flops_s=2.0 * size**3 / matmul_s)
    if cuda:
        del source, target, left, right, out
        torch.cuda.empty_cache()
    return rates


def _best_s(body: Callable[[], object], device: str, times: int) -> float:
    """Seconds of one call: the best of five rounds of `times` calls each, after one to warm up."""

    def one_round() -> None:
        for _ in range(times):
            body()
        synchronize(device)

    one_round()
    return min(timeit.repeat(one_round, number=1, repeat=5)) / times


@contextmanager
def memory_watched(device: str, *, on: bool, every_s: float = 0.05) -> Iterator[dict[str, float]]:
    """Fills in `peak_device_gib`: the peak memory of the whole CUDA device while entered, whoever takes it.

    What a process's allocator keeps counts here, unlike in its own peak of what it handed out. A CPU is not watched.
    on: False watches nothing, for work in this very process, which may be capturing CUDA graphs.
    """
    peak: dict[str, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            free, total = torch.cuda.mem_get_info(device)
            peak["peak_device_gib"] = max(peak.get("peak_device_gib", 0.0), (total - free) / _GIB)
            done.wait(every_s)

    thread = threading.Thread(target=watch, daemon=True, name="areno-memory-watch")
    if on and device.startswith("cuda"):
        thread.start()
    try:
        yield peak
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
