"""Handle Ctrl-C, SIGTERM and SIGUSR1.

From `exit_on_interrupt` to `raise_on_interrupt`, while a command imports its modules, Ctrl-C ends the process with one
line and exit code 130 instead of a traceback. `InterruptDelay` delays a signal until a point where no work is lost. It
delays only the first signal, and for at most LIMIT_S seconds.
"""

from __future__ import annotations

import gc
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


def exit_on_interrupt() -> None:
    """If this process is a command of areno, let Ctrl-C end it at once, and switch garbage collection off."""
    if is_command(sys.orig_argv[1:]) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_interrupted)
        gc.disable()  # a command would search what it imports, which is no garbage, for a twentieth of its start


def raise_on_interrupt() -> None:
    """Undo `exit_on_interrupt`: Ctrl-C raises KeyboardInterrupt, garbage is collected."""
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()
        gc.enable()


def _exit_interrupted(number: int, frame: object) -> None:
    # An exception could be swallowed or replaced by the import of a library.
    os.write(2, b"interrupted\n")
    os._exit(130)


def is_command(words: list[str]) -> bool:
    """Return whether Python was started with a command module of areno or the script `areno`.

    `words` are sys.orig_argv[1:]. With sys.argv, the result would also be True in processes of multiprocessing.
    """
    while words and words[0].startswith("-"):
        if words[0] == "-m":
            package, _, rest = words[1].partition(".")
            return package == "areno" and rest.partition(".")[0] in _COMMANDS
        words = words[2 if words[0] in _WITH_VALUE else 1 :]
    return bool(words) and os.path.basename(words[0]) == "areno"


LIMIT_S = 10.0  # the most seconds for which a signal is delayed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_STOPPING = b"\nstopping as soon as nothing is lost by it, in at most %d s; a second signal ends at once\n" % LIMIT_S


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM or SIGUSR1. It derives from KeyboardInterrupt, so that code for Ctrl-C handles it, too."""


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """Raise Terminated. Commands of areno install it as the handler of SIGTERM and SIGUSR1."""
    raise Terminated


@contextmanager
def signal_handlers(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Install a handler for signals within a `with` block. Does nothing outside the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    own = {number: signal.getsignal(number) for number in numbers if in_main}
    before = {number: found for number, found in own.items() if found is not None}  # None: installed by a C library
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)


@contextmanager
def reraise_interrupts() -> Iterator[None]:
    """Raise an interrupt again at the end of the block, in case a library replaced it by an error of its own."""
    received: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: found for number, found in before.items() if callable(found)}

    def record_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        before[number](number, frame)

    try:
        with signal_handlers(record_signal, *before):
            yield
    except Exception:
        if not received:
            raise
    if received:
        before[received[0]](received[0], None)


class InterruptDelay:
    """Delays the first signal within a `with` block until `raise_if_interrupted` or `interruptible` is called.

    A second signal interrupts at once, and a delayed signal interrupts after LIMIT_S seconds.

    A signal is delayed only if its handler raises KeyboardInterrupt, as Python's handler for Ctrl-C and
    `raise_terminated` do. So in a script without these handlers SIGTERM still ends the process. Outside the main thread
    nothing is delayed. `report` is called in the signal handler with a message in UTF-8, and must not take a lock. None
    writes to stderr.
    """

    def __init__(self, report: Callable[[bytes], object] | None = None) -> None:
        self._report = report or partial(os.write, 2)
        self._before: dict[int, Any] = {}
        self._received: int | None = None  # the delayed signal
        self._is_interruptible = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> InterruptDelay:
        self._received = None
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self._before = {n: f for n, f in found.items() if f in (signal.default_int_handler, raise_terminated)}
            for number in self._before:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        self._cancel_timer()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def raise_if_interrupted(self) -> None:
        if self._received is not None and self._timer is not None:
            self._cancel_timer()
            self._before[self._received](self._received, None)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let signals interrupt at once, for long work that may be abandoned at any time."""
        self.raise_if_interrupted()
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Delay the first signal, and interrupt at the second, or at the first inside `interruptible`."""
        if self._received is not None or self._is_interruptible:
            self._received = number
            self._cancel_timer()
            self._before[number](number, frame)
        self._received = number
        self._report(_STOPPING)  # not by a logger, whose lock the interrupted code may hold
        self._timer = threading.Timer(LIMIT_S, signal.pthread_kill, (threading.main_thread().ident, number))
        self._timer.daemon = True
        self._timer.start()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
