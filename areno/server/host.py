"""Threads for work that would hold an event loop up.

Runs an application in a thread of its own, whose event loop no code of a user can hold up.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from areno.errors import EngineError

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


_logger = logging.getLogger("areno.server.http")


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """Return whether a record is not about a client that speaks no HTTP, or that has gone."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


_logger.addFilter(_is_of_the_server)  # the traceback of each of them would fill the log
_LEAST_S = 0.01  # aiohttp takes 0 for no limit at all
_MORE_S = 5.0  # that the end may take beside the requests under way


class ServerThread:
    """An application at an address, from `start` until `stop`. port 0: any that is free.

    grace_s: at the end, how long requests under way may still take.
    """

    def __init__(
        self, make: Callable[[], web.Application], host: str = "127.0.0.1", port: int = 0, grace_s: float = 0.0
    ):
        self._make, self._host, self._port, self._grace_s = make, host, port, grace_s
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self.url = ""

    def start(self) -> str:
        """Serve; the address, such as http://127.0.0.1:8000. EngineError where the port is taken."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="areno-server")
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise EngineError(f"the server cannot listen at {self._host}:{self._port}: {self._error}") from self._error
        return self.url

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something beside the requests. Of no effect where the server has ended."""
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()

    def stop(self) -> None:
        """Take no more requests, wait for those under way, then end them. Again: of no effect."""
        if self._loop is None or self._stopping is None or self._thread is None:
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(self._grace_s + _MORE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        grace_s = max(self._grace_s, _LEAST_S)
        # The application unpacks bodies itself, beside the event loop.
        runner = web.AppRunner(
            self._make(), handler_cancellation=True, access_log=None, shutdown_timeout=grace_s, auto_decompress=False,
            logger=_logger,
        )  # fmt: skip
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=1024).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._ready.set()
            await self._stopping.wait()
        finally:
            await runner.cleanup()
