"""What the processes of users' code print, as log lines: limited for each step, with control characters as escapes.

One process of users' code as the driver sees it: what it was sent, until when it must answer, and its end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Pipe
from typing import IO, Any

from areno.errors import printable
from areno.user_processes.keeper import exit_text

_MOST_BYTES = 2**18  # of a step, of all processes of a pool
_OF_A_LINE, _LINE_BYTES = 64, 4096  # what the log writes before each line; a longer line is cut into several


class Output:
    """The printed lines of all processes of a pool. name: of the pool, which begins each line."""

    def __init__(self, name: str):
        self._name, self._lock, self._left = name, threading.Lock(), _MOST_BYTES

    def begin_step(self) -> None:
        """Log lines again, if too many were printed before."""
        with self._lock:
            self._left = _MOST_BYTES

    def log(self, printed: IO[bytes]) -> None:
        """Log what a process prints, until it and all that it started are gone; over the limit, only read it."""
        logger = logging.getLogger(f"areno.{self._name}s")
        with printed:
            while line := printed.readline(_LINE_BYTES):
                with self._lock:
                    is_shown = self._left > 0
                    self._left -= len(line) + _OF_A_LINE
                    is_last = is_shown and self._left <= 0
                if is_shown:
                    logger.info("%s: %s", self._name, printable(line.decode(errors="replace").rstrip()))
                if is_last:
                    logger.warning("%s: more than 256 KiB printed in this step; the rest is left out", self._name)


_ASYNC_SPARE_S = 5.0  # an async function keeps time itself; this much later its process is taken to hang
_END_S = 10.0  # a keeper ends within this time
_CODE_S = 5.0  # and tells its exit code, when the process has closed its connection
_LAST_LINES_S = 1.0  # then for what was printed last; longer where a process that nobody could end holds its output
_HELD_BYTES = 1 << 16 if sys.platform == "linux" else 0  # kept for a socket whose other end does not read


class Worker:
    """One process as the driver sees it: starting, idle (no chunk), or busy with `chunk` until `deadline`.

    serves: the module whose `serve` runs in it. output: logs what it prints.
    """

    def __init__(self, first_message: tuple[Any, ...], import_limit_s: float, serves: str, output: Output):
        self.connection, theirs = Pipe()
        # Not multiprocessing: its children would import the driver's main module and all that this imports.
        fd = theirs.fileno()
        start = f"from areno.user_processes.keeper import main; main({fd}, {os.getpid()}, {serves!r})"
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
        with theirs:
            # In a session of its own: Ctrl-C does not reach it.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # not the run's: what the function starts would hold that open
                stderr=subprocess.STDOUT,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._printed = threading.Thread(target=output.log, args=(self.process.stdout,), daemon=True)
        self._printed.start()
        self.chunk: deque[int] = deque()
        self.sent = 0
        self.is_async = False
        self.is_starting = True
        self.deadline = time.monotonic() + import_limit_s
        self._sender: threading.Thread | None = None
        self._post(first_message)

    @property
    def is_idle(self) -> bool:
        return not self.is_starting and not self.chunk

    def send(self, chunk: list[tuple[int, bytes]], timeout_s: float) -> None:
        if not chunk:
            return
        self.chunk = deque(position for position, _ in chunk)
        self.sent = len(chunk)
        self._post(chunk)
        self.deadline = time.monotonic() + timeout_s + (_ASYNC_SPARE_S if self.is_async else 0.0)

    def _post(self, message: Any) -> None:
        """Send what the system holds for the process at once, and more in a thread: who hangs does not read it."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

        def send() -> None:
            with contextlib.suppress(OSError):  # the process is dead; reading from it will show that
                self.connection.send_bytes(data)

        if len(data) <= _HELD_BYTES:  # it has read all before: it has answered, or this is the first
            return send()
        self._sender = threading.Thread(target=send, daemon=True)
        self._sender.start()

    def answered(self, position: int, timeout_s: float) -> None:
        self.chunk.remove(position)
        if not self.chunk:
            self.deadline = math.inf
        elif not self.is_async:  # the next call has just begun
            self.deadline = time.monotonic() + timeout_s

    def exit_text(self) -> str:
        try:
            return exit_text(self.process.wait(timeout=_CODE_S))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def stop(self) -> None:
        """Tell the keeper to end the process and all that it started, without waiting."""
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # somebody may have stopped the keeper, too

    def end(self) -> None:
        self.stop()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if self._sender is not None:
            self._sender.join(1.0)  # it ends with the process
        self._printed.join(_LAST_LINES_S)
        self.connection.close()
