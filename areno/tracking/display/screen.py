"""Redraws a few lines at the bottom of a terminal from a thread, and prints all other output above them.

The cursor is never hidden, and no mode of the terminal is changed. So the terminal stays usable if the process is
stopped, continued or killed.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

Line = Sequence[tuple[str, str]]
"""The parts of a line, each with its text and its style of rich."""

INTERVAL_S = 0.25
SHARE = 0.004
"""The largest share of the time that drawing may take. Slow drawing happens less often."""
_LONGEST_S = 1.0  # the first drawing is slow, because it imports modules
_TOGETHER_S, _LATE_S = 0.05, 0.3
_FLUSH_S = 0.5
_END_S = 2.0
_COLORS = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}


class Screen:
    """Shows lines at the bottom of a terminal until `close`. Until then, it replaces sys.stderr and sys.stdout.

    `lines(width, height)` returns the lines to show, fewer than `height`. Both arguments are in characters. If drawing
    raises an exception, sys.stderr and sys.stdout are restored, and `failed` is called once with the exception, in any
    thread.
    """

    def __init__(self, stream: TextIO, lines: Callable[[int, int], list[Line]], failed: Callable[[Exception], None]):
        self._stream, self._lines, self._failed = stream, lines, failed
        self._colors = _COLORS.get(Console(file=stream).color_system or "")
        self._above: deque[str] = deque()
        self._is_over = False  # the thread no longer writes the lines of `_above`
        self._ending = threading.RLock()  # held while the thread ends; a signal handler may print meanwhile
        self._widths: list[int] = []  # the widths of the lines that the terminal shows
        self._wake, self._shown, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._continued = False  # the process was stopped, so other programs have written to the terminal
        self._signal: Any = None
        self._streams: list[tuple[str, TextIO, OutputAbove]] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="areno-display")

    def start(self) -> None:
        for name in ("stderr", "stdout"):
            before = vars(sys)[name]
            if before is not None and before.isatty():
                above = OutputAbove(self, before)
                self._streams.append((name, before, above))
                sys.__dict__[name] = above
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCONT) is signal.SIG_DFL:
            self._signal = signal.signal(signal.SIGCONT, self._on_sigcont)
        self._thread.start()

    def print(self, text: str) -> None:
        """Print complete lines above the display. The drawing thread writes them a little later, see `flush`."""
        line = text if text.endswith("\n") else text + "\n"
        with self._ending:
            if not self._is_over:
                self._above.append(line)
                self._wake.set()
                return
        self._stream.write(line)

    def flush(self) -> None:
        """Wait at most _FLUSH_S seconds until all printed lines are on the terminal.

        In the main thread this returns at once, because Ctrl-S may block the terminal and the steps of the run must not
        be delayed. The main thread calls `close` before it ends.
        """
        waits = threading.current_thread() not in (threading.main_thread(), self._thread)
        if waits and self._above and not self._ended.is_set():
            self._shown.clear()
            self._wake.set()
            self._shown.wait(_FLUSH_S)

    def close(self, last: str = "") -> None:
        """Print `last` in place of the lines, and restore sys.stderr and sys.stdout. Later calls do nothing.

        If Ctrl-S blocks the terminal, this waits at most _END_S seconds.
        """
        if self._ended.is_set():
            return
        self._restore()
        if last:
            self.print(last)
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _restore(self) -> None:
        for name, before, above in self._streams:
            above.end()
            if vars(sys)[name] is above:
                sys.__dict__[name] = before
        self._streams = []
        if self._signal is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCONT, self._signal)
            self._signal = None

    def _on_sigcont(self, number: int, frame: Any) -> None:
        """Handle SIGCONT. Other programs have written to the terminal while the process was stopped."""
        self._continued = True

    def _run(self) -> None:
        interval = 0.0
        try:
            while not self._ended.is_set():
                started = time.monotonic()
                is_woken = self._wake.wait(interval)
                # Lines often come together. After a stop, the handler of SIGCONT needs a moment of the main thread.
                if is_woken or time.monotonic() - started > interval + _LATE_S:
                    time.sleep(_TOGETHER_S)
                self._wake.clear()
                before = time.thread_time()
                self.draw()
                interval = min(max(INTERVAL_S, (time.thread_time() - before) / SHARE), _LONGEST_S)
            with self._ending:
                self.draw(keep=False)
                self._is_over = True
        except Exception as error:
            with self._ending:
                self._ended.set()
                self._restore()
                self._is_over = True
                self._shown.set()
                with contextlib.suppress(Exception):
                    self._stream.write("".join(self._above))
            self._failed(error)

    def draw(self, keep: bool = True) -> None:
        """Write the new output above the lines. Then redraw the lines or, if `keep` is False, erase them."""
        size = os.get_terminal_size(self._stream.fileno())
        width, height = size.columns or 80, size.lines or 24  # 0: a terminal that does not know its size
        here = _is_in_foreground(self._stream.fileno())
        above = [self._above.popleft() for _ in range(len(self._above))]
        if self._continued or not here:
            self._continued, self._widths = False, []
        # The first row stays free: tmux would keep what is erased there in its scrollback.
        lines = self._lines(width, height - 1) if keep and here else []
        # On a terminal that has become narrower, a line may take several rows. Rows above the top cannot be erased.
        rows = min(sum(max(1, -(-cells // width)) for cells in self._widths), height - 1)
        text = [f"\x1b[{rows}A" if rows else "", "\r", "\x1b[J" if above or not lines else "", *above]
        for line in lines:
            text += [*(self._styled(part, style) for part, style in line), "\x1b[K\n"]
        if lines:
            text.append("\x1b[J")
        self._widths = [sum(cell_len(part) for part, _ in line) for line in lines]
        if above or lines or rows:
            self._stream.write("".join(text))
            self._stream.flush()
        self._shown.set()

    def _styled(self, text: str, style: str) -> str:
        return Style.parse(style).render(text, color_system=self._colors) if style and self._colors else text


class OutputAbove(io.TextIOBase):
    """A text stream in place of sys.stderr or sys.stdout that prints complete lines above the display.

    An incomplete last line waits for the next call. After `end`, everything goes to the replaced stream.
    """

    def __init__(self, screen: Screen, stream: TextIO):
        self._screen, self._stream, self._rest, self._lock = screen, stream, "", threading.Lock()
        self._ended = False

    def write(self, text: str, /) -> int:
        if self._ended:  # a caller has kept this object
            return self._stream.write(text)
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            # A bar that is redrawn with carriage returns leaves its last state.
            self._screen.print("".join(line.rstrip("\r").rpartition("\r")[2] + "\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        if self._ended:
            self._stream.flush()
        else:
            self._screen.flush()

    def end(self) -> None:
        rest, self._rest = self._rest.rpartition("\r")[2], ""
        if rest:
            self._screen.print(rest)
        self._ended = True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        """The binary stream that is replaced. Bytes written to it bypass the display."""
        return self._stream.buffer


def _is_in_foreground(terminal: int) -> bool:
    """Return whether this process owns the terminal. After Ctrl-Z and `bg`, the shell owns it."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return True


def can_draw(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that can show the display, with at least 40 columns and Unicode."""
    if stream is None or not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        "▁█━╭│·".encode(stream.encoding)
        return os.get_terminal_size(stream.fileno()).columns >= 40
    except (UnicodeEncodeError, OSError, io.UnsupportedOperation):
        return False
