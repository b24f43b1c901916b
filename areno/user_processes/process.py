"""Run user code in a process of its own, for reward functions and agents alike.

The keeper (keeper.py) calls `run` with the `serve(connection)` of a module. `serve` loads the user code, sends
("ready", is_async), and answers each message by (position, answer). `ForkedCopies` ends copies of the process that the
user code makes by a fork.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from areno.errors import ArenoError, ConfigError, Problem
from areno.files.user_code import describe_error

MAX_TEXT = 500  # characters of a message

_ENDED = "a process that the agent forked returned or awaited, and was ended; end it yourself with os._exit()"
_COPY_LIMIT_S = 0.2  # seconds to wait for a forked copy of this process that leaves the user code


def run(fd: int, serve: Callable[[Connection], None]) -> None:
    """Serve until the driver closes the socket. Then end the process.

    Args:
        fd: File descriptor of the socket.
        serve: Function that serves. If it raises an ArenoError, the driver gets its problems.
    """
    signal.signal(signal.SIGINT, lambda *_: None)  # the driver handles Ctrl-C
    os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # this process may end at any moment
    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        try:
            serve(connection)
        except ArenoError as error:
            # As texts, since an error of user code may hold objects that cannot be pickled.
            connection.send(("failed", [Problem(problem.key, problem.message) for problem in error.problems]))
    os._exit(0)


def is_async(function: Any) -> bool:
    """Return whether a function or callable object is async.

    Args:
        function: A function or callable object.
    """
    call = getattr(function, "__call__", None)  # noqa: B004  # that of an object may be async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def unpickle(data: bytes, key: str) -> Callable[..., Any]:
    """Load a function that a script passed as an object.

    Args:
        data: The pickled function.
        key: Setting that errors name.

    Raises:
        ConfigError: If the function does not load.
    """
    try:
        return pickle.loads(data)
    except (Exception, SystemExit) as error:  # it imports the module of the function, which may raise anything
        text = f"the function given does not load: {describe_error(error)}"
        raise ConfigError(Problem(key, text)) from error


def event_loop(end_copy: Callable[[], object]) -> Any:
    """Return an event loop that forked copies of this process cannot run.

    A copy shares the connections of the loop and, on Linux, the list of those that it waits for (epoll). If it ran the
    loop, or only closed a connection, this process would wait for answers in vain.

    Args:
        end_copy: Called in a copy that awaits, to end it.
    """
    from asyncio import SelectorEventLoop
    from selectors import DefaultSelector

    selector = DefaultSelector()
    loop = SelectorEventLoop(selector)

    def leave() -> None:
        selector.close()
        # The copy may await in the middle of an iteration of the loop, with other tasks next, or at its end.
        loop._ready.clear()  # type: ignore[attr-defined]
        loop.call_soon(end_copy)
        selector.select = lambda timeout=None: end_copy()  # type: ignore[method-assign]

    os.register_at_fork(after_in_child=leave)
    return loop


class ForkReturned(Exception):
    """User code forked, and the copy of this process left the user code, too."""


class ForkedCopies:
    """Guard against copies of this process that user code makes by a fork.

    A copy must not answer, since it shares the connection. A copy that leaves the user code is ended. With `reports`,
    it first reports this through a pipe, which every copy holds open until it ends or becomes another program. Without,
    it prints a message, because with calls at the same time nobody could tell which call made it.

    Args:
        connection: Connection to the driver, which copies close.
        reports: Whether a copy reports through a pipe, so that the call fails.
    """

    def __init__(self, connection: Connection, reports: bool = True):
        self._original, self._reports = os.getpid(), reports
        self._pipe: tuple[int, int] | None = None
        os.register_at_fork(before=self._open if reports else lambda: None, after_in_child=connection.close)

    def _open(self) -> None:
        """Open the pipe before the first fork."""
        if self._pipe is None:
            self._pipe = os.pipe()

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Run user code in this `with` block.

        Raises:
            ForkReturned: If a copy left the block. It replaces the result or exception of the block.
        """
        self.end_copy()
        try:
            yield
        except SystemExit:
            if os.getpid() != self._original:
                os._exit(0)  # a proper end of a copy
            raise
        finally:
            self.end_copy()
            if self._pipe is not None and self._copy_left():
                raise ForkReturned("forked, and the forked process returned too; end it with os._exit()")

    def end_copy(self) -> None:
        """End this process if it is a copy, after reporting it."""
        if os.getpid() != self._original:
            if not self._reports:
                print(_ENDED, flush=True)
            elif self._pipe is not None:
                with contextlib.suppress(OSError):  # the original no longer reads
                    os.write(self._pipe[1], b".")
            os._exit(0)

    def _copy_left(self) -> bool:
        """Return whether a copy has left the block since the first fork.

        ForkedCopies that are still inside are not waited for.
        """
        assert self._pipe is not None
        reader, writer = self._pipe
        self._pipe = None
        os.close(writer)
        report = wait([reader], _COPY_LIMIT_S) and os.read(reader, 1)
        os.close(reader)
        return bool(report)
