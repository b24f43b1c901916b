"""A progress counter of this process, which a watchdog reads to detect hangs.

Long-running code calls `beat` after each unit of work. The watchdog (areno.engine.processes.watchdog) reports a hang
if the counter does not increase. So only the working code may call `beat`, never a separate thread, which would
continue to count while the work hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_counters: Any = [0]
_index = 0
_work: list[tuple[str, int]] = []  # (name, thread) of each open `working` block, outermost first


def beat() -> None:
    """Increase the progress counter by one, after a unit of work."""
    _counters[_index] += 1


def count() -> int:
    """Return the value of the progress counter."""
    return _counters[_index]


def count_in(counters: Any, index: int) -> None:
    """Move the progress counter to shared memory, `counters[index]`, so that another process can read it."""
    global _counters, _index
    _counters, _index = counters, index


@contextmanager
def working(name: str) -> Iterator[None]:
    """Mark a `with` block or decorated function as work that must make progress. The report of a hang shows `name`."""
    entry = (name, threading.get_ident())
    _work.append(entry)
    try:
        yield
    finally:
        _work.remove(entry)


def work() -> list[tuple[str, int]]:
    """Return (name, thread id) of each `working` block that has not ended, outermost first."""
    return list(_work)
