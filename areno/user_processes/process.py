"""The code that runs in every process of user code, whether it calls reward functions or agents.

The supervisor (areno/user_processes/supervisor.py) forks this process. Then `serve_driver` is called in it, with the
function `serve(connection)` of areno.scoring.process or areno.agents.process. `serve` loads the user code and sends
("ready", is_async) to the driver. The driver then sends calls, each with a position, which is the index of the call in
the driver's list of calls. `serve` answers each call with (position, answer).
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


def serve_driver(fd: int, serve: Callable[[Connection], None]) -> None:
    """Call `serve` until the driver closes the socket `fd`, then end this process. Does not return.

    The problems of an ArenoError are sent to the driver.
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
    call = getattr(function, "__call__", None)  # noqa: B004  # that of an object may be async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def unpickle(data: bytes, key: str) -> Callable[..., Any]:
    """Unpickle a function that a script has passed. Raises a ConfigError about the setting `key` if that fails."""
    try:
        return pickle.loads(data)
    except (Exception, SystemExit) as error:  # it imports the module of the function, which may raise anything
        text = f"the function given does not load: {describe_error(error)}"
        raise ConfigError(Problem(key, text)) from error


def new_event_loop(end_copy: Callable[[], object]) -> Any:
    """Return an event loop that stops working in child processes that user code forks.

    A forked child shares the loop's connections and, on Linux, its epoll list. If the child ran the loop or closed a
    connection, this process would no longer receive answers. A child that tries to run the loop calls `exit_if_child`
    instead, which must end the child.
    """
    from asyncio import SelectorEventLoop
    from selectors import DefaultSelector

    selector = DefaultSelector()
    loop = SelectorEventLoop(selector)

    def stop_in_child() -> None:
        selector.close()
        # The copy may await in the middle of an iteration of the loop, with other tasks next, or at its end.
        loop._ready.clear()  # type: ignore[attr-defined]
        loop.call_soon(end_copy)
        selector.select = lambda timeout=None: end_copy()  # type: ignore[method-assign]

    os.register_at_fork(after_in_child=stop_in_child)
    return loop


class ForkReturned(Exception):
    """User code called os.fork, and the forked child also returned from the user code."""


class ForkedChildren:
    """Ends forked children of this process that return from the user code.

    Such a child would answer the driver on the connection that it shares with this process. If `reports` is True, the
    call of user code in progress fails, because the child writes to a pipe that this process reads. If False, the child
    only prints a message. Use False if several calls are in progress at once, because it is then unknown which one
    forked.
    """

    def __init__(self, connection: Connection, reports: bool = True):
        self._original, self._reports = os.getpid(), reports
        self._pipe: tuple[int, int] | None = None
        os.register_at_fork(before=self._open_pipe if reports else lambda: None, after_in_child=connection.close)

    def _open_pipe(self) -> None:
        """Before a fork, open the pipe through which the child can report to this process."""
        if self._pipe is None:
            self._pipe = os.pipe()

    @contextlib.contextmanager
    def guard_user_code(self) -> Iterator[None]:
        """Return a context manager for a block that calls user code. A forked child that leaves the block is ended.

        If `reports`, ForkReturned is then raised in the original process.
        """
        self.exit_if_child()
        try:
            yield
        except SystemExit:
            if os.getpid() != self._original:
                os._exit(0)  # the copy has ended itself, as it should
            raise
        finally:
            self.exit_if_child()
            if self._pipe is not None and self._child_left_user_code():
                raise ForkReturned("forked, and the forked process returned too; end it with os._exit()")

    def exit_if_child(self) -> None:
        """If this process is a forked child, report that to the original process and end."""
        if os.getpid() != self._original:
            if not self._reports:
                print(_ENDED, flush=True)
            elif self._pipe is not None:
                with contextlib.suppress(OSError):  # the original no longer reads
                    os.write(self._pipe[1], b".")
            os._exit(0)

    def _child_left_user_code(self) -> bool:
        """Return whether a forked child has left the block of user code, and close the pipe on which it reports that.

        This waits until a child reports or all children have ended, at most _COPY_LIMIT_S seconds.
        """
        assert self._pipe is not None
        reader, writer = self._pipe
        self._pipe = None
        os.close(writer)
        report = wait([reader], _COPY_LIMIT_S) and os.read(reader, 1)
        os.close(reader)
        return bool(report)
