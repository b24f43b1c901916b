"""How worker processes start and end: without the user's script, deaf to Ctrl-C, not outliving the driver. No torch."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from types import FunctionType
from typing import Any


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the driver's `__main__` from a process that is being spawned.

    A spawned child imports the parent's main script again. Ours need nothing from it, and a script without an
    `if __name__ == "__main__"` guard would start itself once more.
    """
    main = sys.modules["__main__"]
    saved = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    for name in saved:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(main, name, value)


def follow_parent() -> None:
    """To be called first in a child: leave signals to the driver, and end when the driver is gone, even amid work.

    A terminal sends Ctrl-C to all processes of a job, and so does a cluster with SIGTERM and SIGUSR1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, a program that this one starts does not inherit it
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="areno-parent-watch").start()


def dumps(value: Any) -> bytes:
    """Pickle for a child without the driver's `__main__`: what is defined there, or locally, travels by value."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)) and (obj.__module__ == "__main__" or "<" in obj.__qualname__):
            import dill

            return dill.loads, (dill.dumps(obj, recurse=True),)
        return NotImplemented
