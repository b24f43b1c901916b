"""Show that a process makes progress, by a counter that its work increases.

Code that works for long calls `beat` after each part of the work. A watchdog (areno.engine.processes.watchdog) looks at
the counter. So only the work itself may call `beat`, never a thread that would continue while the work hangs.
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
    """Count one more part of the work."""
    _counters[_index] += 1


def count() -> int:
    """Return the number of parts so far."""
    return _counters[_index]


def count_in(counters: Any, index: int) -> None:
    """Count in shared memory from now on, so that another process sees the counter.

    Args:
        counters: Array of counters.
        index: Index of this process's counter.
    """
    global _counters, _index
    _counters, _index = counters, index


@contextmanager
def working(name: str) -> Iterator[None]:
    """Name the work of a `with` block or decorated function, which must make progress. Blocks may be nested.

    Args:
        name: Name of the work, for the report of a hang.
    """
    entry = (name, threading.get_ident())
    _work.append(entry)
    try:
        yield
    finally:
        _work.remove(entry)


def work() -> list[tuple[str, int]]:
    """Return (name, id of the thread) of each open `working` block, outermost first."""
    return list(_work)
