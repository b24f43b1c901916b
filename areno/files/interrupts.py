"""Ctrl-C while the modules of a command are imported: one line and exit code 130 in place of a traceback.

Ctrl-C, SIGTERM and SIGUSR1: held until a place where nothing is lost, but not for long, and not twice.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

_COMMANDS = ("bench", "cli", "recipes")  # packages of areno
_WITH_VALUE = ("-W", "-X")  # options of Python


def begin() -> None:
    """Let Ctrl-C end this process at once, if it has been started as a command of areno."""
    if _is_command(sys.orig_argv[1:]) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def end() -> None:
    """Let Ctrl-C raise a KeyboardInterrupt, as usual: the command handles it from here on."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> None:
    # An exception could be lost in the import of a library, or become another one.
    os.write(2, b"interrupted\n")
    os._exit(130)


def _is_command(words: list[str]) -> bool:
    """Return whether Python was started as `-m areno.recipes.gspo` or with the script `areno`. words: what follows it.

    sys.argv does not tell: a process that multiprocessing starts has that of its parent.
    """
    while words and words[0].startswith("-"):
        if words[0] == "-m":
            package, _, rest = words[1].partition(".")
            return package == "areno" and rest.partition(".")[0] in _COMMANDS
        words = words[2 if words[0] in _WITH_VALUE else 1 :]
    return bool(words) and os.path.basename(words[0]) == "areno"


LIMIT_S = 10.0  # that a stop waits for the work under way
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ASKED = b"\nstopping as soon as nothing is lost by it, at the latest in %d s; a second signal ends at once\n" % LIMIT_S


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGUSR1. It is a KeyboardInterrupt so that whatever handles Ctrl-C handles it too."""


def terminate(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM and SIGUSR1 under a command of ours."""
    raise Terminated


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Give these signals a handler. Outside the main thread, where Python handles none, they keep theirs."""
    in_main = threading.current_thread() is threading.main_thread()
    own = {number: signal.getsignal(number) for number in numbers if in_main}
    before = {number: found for number, found in own.items() if found is not None}  # None: not from Python, and stays
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)


@contextmanager
def not_lost() -> Iterator[None]:
    """Around a library that may turn a KeyboardInterrupt into an error of its own: raise it again at the end."""
    came: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: found for number, found in before.items() if callable(found)}

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        before[number](number, frame)

    try:
        with handled(take, *before):
            yield
    except Exception:
        if not came:
            raise
    if came:
        before[came[0]](came[0], None)


class Stop:
    """As a context manager, holds the first signal until `check` or `at_once`; a second one interrupts at once.

    Only handlers that would raise a KeyboardInterrupt are replaced: that of Python for Ctrl-C, and `terminate`. So
    SIGTERM ends a script as it always has. Outside the main thread nothing is held.

    tell: is given, in place of stderr, what to say to the user when a signal is held. It must not take a lock.
    """

    def __init__(self, tell: Callable[[bytes], object] | None = None) -> None:
        self._tell = tell or partial(os.write, 2)
        self._before: dict[int, Any] = {}
        self._asked: int | None = None  # the signal
        self._at_once = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Stop:
        self._asked = None
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self._before = {n: f for n, f in found.items() if f in (signal.default_int_handler, terminate)}
            for number in self._before:
                signal.signal(number, self._take)
        return self

    def __exit__(self, *exc: object) -> None:
        self._cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Raise the KeyboardInterrupt that is held, if there is one."""
        if self._asked is not None and self._timer is not None:
            self._cancel()
            self._before[self._asked](self._asked, None)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around work that may be dropped at any moment, and that may take long."""
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None or self._at_once:
            self._asked = number
            self._cancel()
            self._before[number](number, frame)
        self._asked = number
        self._tell(_ASKED)  # in the middle of anything: a logger may be in use
        self._timer = threading.Timer(LIMIT_S, signal.pthread_kill, (threading.main_thread().ident, number))
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
