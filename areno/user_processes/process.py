"""What runs users' code in a process of its own, whatever the code is for: reward functions, agents.

A module that serves has a function `serve(connection)`. The keeper (keeper.py) calls it by `run`. It loads the code,
sends ("ready", is_async), and answers what it is sent by (position, answer).
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

MOST_TEXT = 500  # characters of a message

_ENDED = "a process that the agent forked returned or awaited, and was ended; end it yourself with os._exit()"
_COPY_LIMIT_S = 0.2  # so long is waited for copies of this process to come back


def run(fd: int, serve: Callable[[Connection], None]) -> None:
    """Serve until the driver closes the socket. If `serve` raises an ArenoError, the driver gets its problems."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the driver handles Ctrl-C
    os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # this process may end at any moment
    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        try:
            serve(connection)
        except ArenoError as error:
            # By their texts: what a user's file raises may hold anything.
            connection.send(("failed", [Problem(problem.key, problem.message) for problem in error.problems]))
    os._exit(0)


def is_async(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004  # that of an object may be async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def unpickle(data: bytes, key: str) -> Callable[..., Any]:
    """A function that a script has given. Raises ConfigError of the setting `key`."""
    try:
        return pickle.loads(data)
    except (Exception, SystemExit) as error:  # it imports the module of the function, which may raise anything
        text = f"the function given does not load: {describe_error(error)}"
        raise ConfigError(Problem(key, text)) from error


def event_loop(end_copy: Callable[[], object]) -> Any:
    """Make an event loop that forked copies of this process cannot run.

    A copy shares the connections of the loop and, on Linux, the list of those that it waits for (epoll). If it ran the
    loop, or only closed a connection, this process would wait for answers in vain. end_copy: ends a copy that awaits.
    """
    from asyncio import SelectorEventLoop
    from selectors import DefaultSelector

    selector = DefaultSelector()
    loop = SelectorEventLoop(selector)

    def leave() -> None:
        selector.close()
        # The copy awaits within a turn of the loop, in which other tasks may be next, or at the end of it.
        loop._ready.clear()  # type: ignore[attr-defined]
        loop.call_soon(end_copy)
        selector.select = lambda timeout=None: end_copy()  # type: ignore[method-assign]

    os.register_at_fork(after_in_child=leave)
    return loop


class CameBack(Exception):
    """The user's code forked, and the copy of this process came out of it, too."""


class Copies:
    """Copies of this process that the user's code makes by a fork. They must not answer: they share the connection.

    A copy that comes out of the user's code ends there. With `tells` it says so through a pipe, which every copy holds
    open until it ends or becomes another program. Without, it prints so: where calls run beside each other, nobody
    could say whose copy it is.
    """

    def __init__(self, connection: Connection, tells: bool = True):
        self._original, self._tells = os.getpid(), tells
        self._pipe: tuple[int, int] | None = None
        os.register_at_fork(before=self._open if tells else lambda: None, after_in_child=connection.close)

    def _open(self) -> None:
        if self._pipe is None:
            self._pipe = os.pipe()

    @contextlib.contextmanager
    def stay_inside(self) -> Iterator[None]:
        """Around the user's code. Raises CameBack, in place of what the code returned or raised, if a copy left it."""
        self.end_copy()
        try:
            yield
        except SystemExit:
            if os.getpid() != self._original:
                os._exit(0)  # a proper end of a copy
            raise
        finally:
            self.end_copy()
            if self._pipe is not None and self._told():
                raise CameBack("forked, and the forked process returned too; end it with os._exit()")

    def end_copy(self) -> None:
        """End this process if it is a copy, and tell the original."""
        if os.getpid() != self._original:
            if not self._tells:
                print(_ENDED, flush=True)
            elif self._pipe is not None:
                with contextlib.suppress(OSError):  # nobody listens any more
                    os.write(self._pipe[1], b".")
            os._exit(0)

    def _told(self) -> bool:
        """Whether a copy has come out since the first fork; those that are still inside are not waited for."""
        assert self._pipe is not None
        reader, writer = self._pipe
        self._pipe = None
        os.close(writer)
        told = wait([reader], _COPY_LIMIT_S) and os.read(reader, 1)
        os.close(reader)
        return bool(told)
