"""How device memory is taken, and what to say when it runs out: which settings lower what was needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areno.errors import EngineError

# Not every allocation is torch's own: CUDA graphs, cuBLAS and the CPU's allocator have their own words.
_WORDS = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")


def use_expandable_segments() -> None:
    """Let CUDA memory that was freed serve tensors of any size, also where it lies between others in use.

    Otherwise what training leaves in pieces is lost to the KV cache, and the other way round. A choice of the user in
    PYTORCH_CUDA_ALLOC_CONF stands.
    """
    import torch  # here, since processes that never use it know this module

    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def device_bytes(device: Any, n_sharing: int) -> int:
    """Memory that a worker may take: free on its CUDA device, or its share of all there is for a number on one CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // n_sharing


def host_bytes_free() -> int:
    """Memory of this machine that is available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that an allocation failed."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error).partition("\n")[0] for word in _WORDS)


@contextmanager
def out_of_memory_hint(when: str, advice: Callable[[], Iterable[tuple[Any, ...]]], *args: Any) -> Iterator[None]:
    """Turn an out-of-memory error of the body into an EngineError that names the settings to change.

    when: what the memory was for, a text with a {} for each of `args`: Keys, values, and functions that give a value
    once the memory has run out. advice: gives the changes that would help then; see `areno/engine/layout/advice.py`.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, EngineError) or not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        said = ". ".join(said.split(". ")[:2])  # how much was asked for; the rest helps few
        said = said.replace("{", "{{").replace("}", "}}")
        options = list(advice())
        values = [arg() if callable(arg) else arg for arg in args] + [arg for _, *args in options for arg in args]
        raise EngineError(
            f"out of device memory {when} ({said}): {_either([o[0] for o in options])}", *values
        ) from error


def _either(texts: Sequence[str]) -> str:
    """Join texts as `a, b or c`."""
    return " or ".join([", ".join(texts[:-1])] * (len(texts) > 1) + [*texts[-1:]])
