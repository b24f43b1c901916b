"""Starts child processes that do not import the user's main script, ignore Ctrl-C, and end with the driver.

This module imports no torch, so that a child starts quickly.
"""

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

from areno.files.user_code import USER_MODULE, load_module

_hiding = threading.RLock()


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the driver's `__main__` module from child processes that are spawned inside this `with` block.

    A spawned child would otherwise import the parent's main script. areno's children need nothing from the script, and
    a script without an `if __name__ == "__main__"` guard would start its run a second time. Only one thread at a time
    is inside the block.
    """
    with _hiding:
        main = sys.modules["__main__"]
        saved = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
        for name in saved:
            setattr(main, name, None)
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(main, name, value)


def exit_with_parent() -> None:
    """Ignore stop signals in this child process, and end the process once the driver has ended.

    Call this function first in a child. A terminal or a cluster sends its stop signal (SIGINT, SIGTERM or SIGUSR1) to
    all processes of a job. The driver handles the signal and then closes its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, programs started from here do not inherit it
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="areno-parent-watch").start()


def dumps(value: Any) -> bytes:
    """Pickle a value for a child process. dill pickles the code of functions and classes that it cannot import."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (FunctionType, type)):
            return NotImplemented
        of_file = obj.__module__.startswith(USER_MODULE)
        if not (of_file or obj.__module__ == "__main__" or "<" in obj.__qualname__):
            return NotImplemented
        import dill

        file = sys.modules[obj.__module__].__file__ if of_file else None
        return _loads, (file, obj.__module__, dill.dumps(obj, recurse=True))


def _loads(file: str | None, module: str, content: bytes) -> Any:
    """Unpickle what `_Pickler` has pickled with dill, after importing the user's file, if any, as `module`."""
    import dill

    if file is not None and module not in sys.modules:
        load_module(file, "the script")
    return dill.loads(content)
