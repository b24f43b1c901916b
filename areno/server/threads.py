"""Threads for CPU-heavy work, such as encoding a long prompt, and for a server with its own event loop."""

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
from areno.server.invalid_http import Runner

T = TypeVar("T")
_EXIT_S = 2.0  # the most seconds for which a process waits at exit for work in progress
_running: set[threading.Thread] = set()


class ThreadPool:
    """A pool of threads for an event loop. A thread ends when no work is queued.

    Unlike the threads of `concurrent.futures`, these are daemon threads, so the process can exit while a thread hangs.
    """

    def __init__(self, max_threads: int, name: str):
        self._max_threads, self._name = max_threads, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._n_threads = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread and return its result.

        If the caller is cancelled before a thread is free, `work` is not called.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((future, work))
            starts = self._n_threads < self._max_threads
            self._n_threads += starts
        if starts:
            threading.Thread(target=self._serve, daemon=True, name=self._name).start()
        try:
            return await future
        finally:
            del future  # its error's traceback holds this frame: the cycle would keep the objects of the work alive

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
                    _call_and_settle(future, work)
                del future, work  # so that the next piece of work keeps no objects of this one alive
        finally:
            _running.discard(thread)


def _call_and_settle(future: asyncio.Future[Any], work: Callable[[], Any]) -> None:
    """Call `work`, and set the result of `future` in the thread of its event loop."""
    try:
        settled = partial(_settle, future, work(), None)
    except BaseException as error:
        settled = partial(_settle, future, None, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settled)
    del settled, future  # see `ThreadPool.run`


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


@atexit.register
def _wait_at_exit() -> None:
    """Wait for busy threads. A thread that returns from a library during Python's exit could crash the process."""
    ends_at = time.monotonic() + _EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, ends_at - time.monotonic()))


_logger = logging.getLogger("areno.server.http")


def _is_server_log(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


_logger.addFilter(_is_server_log)  # the tracebacks would fill the log
END_ANSWERS: web.AppKey[Callable[[], object]] = web.AppKey("end_answers")
"""An application's function that ends requests in progress with an error, once the time for a shutdown is over."""
_MIN_GRACE_S = 0.01  # aiohttp takes 0 for no limit at all
_ERROR_S = 1.0  # for requests that are ended to send their error
_SHUTDOWN_S = 5.0  # for the shutdown itself, in addition to the requests in progress


class ServerThread:
    """A web application served in a thread from `start` until `stop`.

    `make` builds the application in this thread. Port 0 picks a free port. After `stop`, requests in progress have
    `grace_s` seconds to finish.
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
        self._runner: Runner | None = None
        self.url = ""

    def start(self) -> str:
        """Start serving, and return the address once requests are accepted. Raises EngineError on failure."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="areno-server")
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise EngineError(f"the server cannot listen at {self._host}:{self._port}: {self._error}") from self._error
        return self.url

    def submit(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the server's event loop without waiting for it. After `stop` this has no effect."""
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the server's event loop, and return its result. Raises EngineError after `stop`."""
        assert self._loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
        except RuntimeError as error:
            work.close()
            raise EngineError("the server has stopped") from error

    def stop(self) -> None:
        """Refuse new requests, wait for those in progress, then cancel the rest."""
        if self._loop is None or self._stopping is None or self._thread is None:
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(self._grace_s + _SHUTDOWN_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def open_socket(self, path: str) -> web.UnixSite:
        """Serve at a Unix socket, too, until `stop` of the result. Called in the event loop."""
        assert self._runner is not None
        site = web.UnixSite(self._runner, path)
        await site.start()
        return site

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app, grace_s = self._make(), max(self._grace_s, _MIN_GRACE_S)
        end_answers = app.get(END_ANSWERS)
        runner = Runner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=grace_s if end_answers is None else grace_s + _ERROR_S,
            auto_decompress=False,  # the application decompresses bodies itself, in worker threads
            logger=_logger,
        )
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=1024).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._ready.set()
            await self._stopping.wait()
        finally:
            if end_answers is not None:
                self._loop.call_later(grace_s, end_answers)
            await runner.cleanup()
