"""How a process shows that it gets on: a count that its work moves.

Code that works for long calls `beat` after each part of the work. A watchdog (areno.engine.processes.watchdog) looks at
the count. So only the work itself may call it, and never a thread that would go on while the work hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_counters: Any = [0]
_index = 0
_work: list[tuple[str, int]] = []  # from the outside in: what goes on, and the thread that does it


def beat() -> None:
    """One more part of the work is done."""
    _counters[_index] += 1


def count() -> int:
    """How many parts so far."""
    return _counters[_index]


def count_in(counters: Any, index: int) -> None:
    """Count in `counters[index]` from now on: in memory that another process sees."""
    global _counters, _index
    _counters, _index = counters, index


@contextmanager
def working(name: str) -> Iterator[None]:
    """Around work of this process that must get on; also a decorator. Blocks may hold others."""
    entry = (name, threading.get_ident())
    _work.append(entry)
    try:
        yield
    finally:
        _work.remove(entry)


def work() -> list[tuple[str, int]]:
    """The `working` blocks that are open, from the outside in: name, and the thread that entered it."""
    return list(_work)
