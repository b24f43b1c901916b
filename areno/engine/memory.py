"""What to say when device memory runs out: which settings lower what was needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from areno.errors import EngineError

# Not every allocation is torch's own: CUDA graphs, cuBLAS and the CPU's allocator have their own words.
_WORDS = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")


@contextmanager
def out_of_memory_hint(when: str, advice: str, *args: Any) -> Iterator[None]:
    """Turns an out-of-memory error of the body into an EngineError that names the settings to change.

    when: what the memory was for. advice: what to do. Both are texts with a {} for each of `args`: Keys and values.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        if isinstance(error, EngineError) or not any(word in said for word in _WORDS):
            raise
        said = ". ".join(said.split(". ")[:2])  # how much was asked for; the rest helps few
        said = said.replace("{", "{{").replace("}", "}}")
        raise EngineError(f"out of device memory {when} ({said}): {advice}", *args) from error
