"""Device and host memory: free and peak bytes, garbage collection, and out-of-memory errors that name remedies."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from areno.config.models import MicroBatchSpec
from areno.cost.remedies import Option, join_by_or, training_remedies
from areno.errors import EngineError, Key
from areno.specs.role import RoleSpec

# New objects after which garbage is collected in a rollout. A thousand samples are tens of thousands of objects, and
# none of them is garbage. With Python's own number, a device would wait for tens of collections.
_ROLLOUT_THRESHOLD = 50_000

# The collections at exit leave out what is frozen, and Triton's binding would report all of its objects as leaked.
atexit.register(gc.unfreeze)

# CUDA graphs, cuBLAS and the CPU's allocator fail with other messages than torch's CUDA allocator.
_WORDS = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator use expandable segments, so that freed memory serves tensors of any size.

    Without them, training cannot use the memory fragments that the KV cache leaves, and vice versa. Does nothing if
    PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set in the environment.
    """
    import torch  # here, because processes without torch import this module, too

    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def available_memory_bytes(device: Any, n_sharing: int) -> int:
    """Return the free memory of a CUDA device or, for a CPU, an equal share of the machine's whole memory."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else total_memory_bytes(device, n_sharing)


def total_memory_bytes(device: Any, n_sharing: int) -> int:
    """Return the whole memory of a CUDA device or, for a CPU, an equal share of the machine's whole memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // n_sharing


class RolloutGarbageCollector:
    """Tunes Python's garbage collector for rollouts. Call `begin` and `end` around each rollout phase."""

    def __init__(self) -> None:
        self.in_rollout = False
        self._threshold = gc.get_threshold()  # of the process, outside of phases

    def begin(self) -> None:
        """Exclude all existing objects from garbage collection, and collect less often.

        A collection that looks through all objects of torch stops the decoder for a tenth of a second.
        """
        gc.freeze()
        if not self.in_rollout:
            self.in_rollout, self._threshold = True, gc.get_threshold()
            gc.set_threshold(_ROLLOUT_THRESHOLD, *self._threshold[1:])

    def end(self) -> None:
        gc.freeze()  # with `unfreeze`, all objects are old ones, or the next collection would look through the samples
        gc.unfreeze()
        if self.in_rollout:
            gc.set_threshold(*self._threshold)
        self.in_rollout = False


def free_unused_memory() -> None:
    """Collect garbage, and return the device memory that torch has reserved but does not use."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


def process_resident_bytes() -> int:
    """Return the host memory that this process has in use (its resident set), or 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def take_peak_bytes(device: Any) -> int:
    """Return the peak memory of a CUDA device, or of this process on a CPU, since the last call.

    If the system cannot reset the peak of a process, the peak counts from the start of the process. Linux can reset it.
    """
    import torch

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        return peak
    except (OSError, StopIteration):  # not Linux, or a container that forbids it
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_bytes_free() -> int:
    """Return the available memory of this machine or, if it is less, of this process's container.

    Without /proc/meminfo, it returns half of the machine's whole memory.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min([machine, *_container_bytes_free()])


_CGROUPS = {
    "/sys/fs/cgroup": ("memory.max", "memory.current"),
    "/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Folder of the memory controller -> files with its limit and its use, for both versions of control groups."""


def _container_bytes_free() -> Iterator[int]:
    """Yield the memory that this process's control group may still allocate. Yields nothing if it has no limit."""
    for folder, (limit, used) in _CGROUPS.items():
        try:
            most, taken = (int((Path(folder) / name).read_text()) for name in (limit, used))
            lines = (Path(folder) / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such file, or "max" in place of a number
            continue
        # Pages of files that were not read again soon are freed when memory is needed.
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        yield max(0, most - taken + cached)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that an allocation failed, on a GPU or in host memory."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error).partition("\n")[0] for word in _WORDS)


@contextmanager
def out_of_memory_hint(when: str, advice: Callable[[], Iterable[tuple[Any, ...]]], *args: Any) -> Iterator[None]:
    """Turn an out-of-memory error of a `with` block into an EngineError that names the settings to change.

    `when` says what the memory was for, such as "in training, with {}={}", and `args` fill its {}. `advice` returns
    remedies, each a tuple (text, *values that fill the {} of the text). `advice`, and functions among `args`, are
    called only after memory has run out.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, EngineError) or not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        said = ". ".join(said.split(". ")[:2])  # keeps the requested size; the rest is rarely useful
        said = said.replace("{", "{{").replace("}", "}}")
        options = list(advice())
        values = [arg() if callable(arg) else arg for arg in args] + [arg for _, *args in options for arg in args]
        raise EngineError(
            f"out of device memory {when} ({said}): {join_by_or([o[0] for o in options])}", *values
        ) from error


def training_memory_hint(
    role: RoleSpec,
    mb_spec: MicroBatchSpec,
    fitting: Callable[[], str],
    beside: Callable[[], Iterable[Option]],
    *,
    recomputes: bool,
    on_cuda: bool,
) -> AbstractContextManager[None]:
    """Return the `out_of_memory_hint` for forward and backward passes.

    `fitting` returns the end of the message, such as the size of the largest micro-batch that would fit, or "".
    `beside` returns remedies that make the KV cache smaller. The other arguments decide which remedies are named.
    """
    size = ("max_tokens_per_mb", mb_spec.max_tokens_per_mb)
    if mb_spec.max_tokens_per_mb is None:
        size = ("mini_bs", mb_spec.mini_bs)
    return out_of_memory_hint(
        "in training, with {}={}{}",
        lambda: training_remedies(role, mb_spec, recomputes=recomputes, beside=beside(), on_cuda=on_cuda),
        Key(f"{role.section}.mb_spec.{size[0]}"),
        size[1],
        fitting,
    )
