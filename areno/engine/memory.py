"""What to say when device memory runs out. Training itself explains its own (TrainBackend)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from areno.errors import EngineError


@contextmanager
def explained_out_of_memory(when: str, remedy: str) -> Iterator[None]:
    """Around what takes memory: an EngineError then says which settings lower what was needed."""
    try:
        yield
    except RuntimeError as error:
        # Not every allocation is torch's own: CUDA graphs, cuBLAS and the CPU's allocator have their own words.
        said = str(error).partition("\n")[0]
        words = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")
        if isinstance(error, EngineError) or not any(word in said for word in words):
            raise
        said = ". ".join(said.split(". ")[:2])  # what was asked for; more is of no use to most
        raise EngineError(f"out of device memory {when} ({said}): {remedy}") from error
