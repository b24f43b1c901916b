"""Threads for work that would hold an event loop up."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_EXIT_S = 2.0  # a process that ends waits this long for work in progress
_running: set[threading.Thread] = set()


class Threads:
    """A few threads that work for event loops. They end when there is nothing to do.

    Unlike those of `concurrent.futures` they are daemons: a process can end although one of them is stuck.

    Args:
        most: Threads that run at once; further work waits.
        name: Of the threads.
    """

    def __init__(self, most: int, name: str):
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._n_threads = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise its error. Work whose caller is cancelled before it begins is dropped.

        Args:
            work: Called once, in one of the threads.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((future, work))
            starts = self._n_threads < self._most
            self._n_threads += starts
        if starts:
            threading.Thread(target=self._serve, daemon=True, name=self._name).start()
        try:
            return await future
        finally:
            del future  # the traceback of its error has this frame: a cycle would keep all that the work had in hand

    def _serve(self) -> None:
        thread = threading.current_thread()
        _running.add(thread)
        try:
            while True:
                with self._lock:
                    if not self._waiting:
                        self._n_threads -= 1
                        return
                    future, work = self._waiting.popleft()
                if not future.cancelled():
                    _finish(future, work)
                del future, work  # a thread in the next piece of work keeps nothing of this one
        finally:
            _running.discard(thread)


def _finish(future: asyncio.Future[Any], work: Callable[[], Any]) -> None:
    try:
        settled = partial(_settle, future, work(), None)
    except BaseException as error:
        settled = partial(_settle, future, None, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settled)
    del settled, future  # see `Threads.run`


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


@atexit.register
def _wait_at_exit() -> None:
    """Wait shortly for the threads: one that comes back from a library amid Python's end could crash the process."""
    ends_at = time.monotonic() + _EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, ends_at - time.monotonic()))
