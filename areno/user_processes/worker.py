"""`Worker`, with which the driver controls one process of user code, and `OutputLogger`, the log of printed lines."""

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

from areno import trace
from areno.errors import printable
from areno.user_processes.supervisor import exit_text

_MAX_BYTES = 2**18  # printed by all processes of a pool in one step
_PREFIX_BYTES = 64  # written by the log before each line
_LINE_BYTES = 4096  # a longer line is split


class OutputLogger:
    """Logs what all processes of a pool print, with control characters escaped, up to 256 KiB per training step."""

    def __init__(self, name: str):
        self._name, self._lock, self._left = name, threading.Lock(), _MAX_BYTES

    def begin_step(self) -> None:
        with self._lock:
            self._left = _MAX_BYTES

    def log(self, printed: IO[bytes]) -> None:
        """Log what a process and its descendants print, until all have ended. Output beyond the limit is dropped."""
        logger = logging.getLogger(f"areno.{self._name}s")
        with printed:
            while line := printed.readline(_LINE_BYTES):
                with self._lock:
                    is_shown = self._left > 0
                    self._left -= len(line) + _PREFIX_BYTES
                    is_last = is_shown and self._left <= 0
                if is_shown:
                    logger.info("%s: %s", self._name, printable(line.decode(errors="replace").rstrip()))
                if is_last:
                    logger.warning("%s: more than 256 KiB printed in this step; the rest is left out", self._name)


# The process of an async function enforces the time limit itself. It counts as hung if it is this much late.
ASYNC_SPARE_S = 5.0
_END_S = 10.0  # for a supervisor to end
EXIT_CODE_S = 5.0  # for a supervisor's exit code after its process has closed the connection
_LAST_LINES_S = 1.0  # for the last printed lines, whose pipe may be held open by a process that could not be killed
_READ_BYTES = 1 << 18  # that one read of a connection takes at most
_HELD_BYTES = 1 << 16 if sys.platform == "linux" else 0  # buffered by the system for a socket that is not read


class Worker:
    """One process of user code. It is starting, idle, or busy with the calls in `chunk` until `deadline`.

    `process` is the supervisor, which ends the process. `chunk` has the indices of unanswered calls, `sent` is the
    number of calls in the last chunk. `has_left` means that the process exits by itself, without starting the calls in
    `chunk`. The next message must arrive by `deadline` (time.monotonic; infinity while idle). `messages` are received
    and still pickled. The pool removes them.
    """

    def __init__(self, first_message: tuple[Any, ...], import_limit_s: float, module: str, output: OutputLogger):
        self.connection, theirs = Pipe()
        # Not multiprocessing: its children would import the driver's main module and all that this imports.
        fd = theirs.fileno()
        start = f"from areno.user_processes.supervisor import main; main({fd}, {os.getpid()}, {module!r})"
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
        with theirs:
            # In a session of its own, so that Ctrl-C does not reach it.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # not the driver's stdout, which processes of the user code would keep open
                stderr=subprocess.STDOUT,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._printed = threading.Thread(target=output.log, args=(self.process.stdout,), daemon=True)
        self._printed.start()
        self.chunk: deque[int] = deque()
        self.sent = 0
        self.messages: deque[bytearray] = deque()
        self._unread = bytearray()  # the beginning of a message of which the rest has not arrived
        self._began_at: dict[int, int] = {}  # by call: when the process got it, or began it if it is not async
        self._ends_at: dict[int, float] = {}  # by call, if it is async: its deadline, the earliest first
        self.is_async = False
        self.is_starting, self.has_left = True, False
        self.deadline = time.monotonic() + import_limit_s
        self._sender: threading.Thread | None = None
        self.send_message(first_message)

    @property
    def is_idle(self) -> bool:
        return not self.is_starting and not self.chunk

    def send_calls(self, chunk: list[tuple[int, bytes]], timeout_s: float) -> None:
        """Send calls, each (index, pickled arguments), and set the deadline of the first answer.

        If the user's function is async, the process may be busy, and the time limit applies to each of the calls.
        """
        if not chunk:
            return
        self.send_message(chunk)
        now, deadline = trace.now(), time.monotonic() + timeout_s + (ASYNC_SPARE_S if self.is_async else 0.0)
        for position, _ in chunk:
            self.chunk.append(position)
            self._began_at[position] = now
            if self.is_async:
                self._ends_at[position] = deadline
        self.sent, self.deadline = len(chunk), min(self.deadline, deadline)

    def postpone_deadlines(self, seconds: float) -> None:
        """Extend the deadlines of all calls. The time limit for importing the user code does not change."""
        if not self.is_starting:
            self.deadline += seconds
        self._ends_at = {position: ends_at + seconds for position, ends_at in self._ends_at.items()}

    def send_message(self, message: Any) -> None:
        """Send a message after all earlier ones.

        If a message may not fit the buffer, it is sent in a thread, so that a process that does not read cannot block
        the driver. While calls are unanswered, every message is sent in a thread.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        before = self._sender if self._sender is not None and self._sender.is_alive() else None

        def send() -> None:
            if before is not None:
                before.join()
            with contextlib.suppress(OSError):  # the process is dead; reading from it will show that
                self.connection.send_bytes(data)

        if before is None and not self.chunk and len(data) <= _HELD_BYTES:
            return send()
        self._sender = threading.Thread(target=send, daemon=True)
        self._sender.start()

    def read_messages(self) -> None:
        """Read once, and append all complete messages to `messages`. Blocks until the connection is readable.

        One read can take many short messages. Connection.recv needs two system calls for each. Raises EOFError if the
        process has closed the connection, OSError if the connection is broken.
        """
        data = os.read(self.connection.fileno(), _READ_BYTES)
        if not data:
            raise EOFError
        unread, start = self._unread, 0
        unread += data
        # The format of multiprocessing.connection.Connection: 4 bytes with the length of the message (or -1 and then 8
        # bytes with the length), then the message.
        while len(unread) >= start + 4:
            first = start + 4
            n_bytes = int.from_bytes(unread[start:first], "big", signed=True)
            if n_bytes < 0:
                first, n_bytes = first + 8, int.from_bytes(unread[first : first + 8], "big")
            if len(unread) < first + n_bytes:
                break
            start = first + n_bytes
            self.messages.append(unread[first:start])
        del unread[:start]

    def remove_answered_call(self, position: int, timeout_s: float) -> tuple[int, int]:
        """Remove an answered call, set the next deadline, and return (start, end) of the call as times of areno.trace.

        Each call of an async function has its own deadline, counted from the time at which it was sent. Its start is
        that time, too.
        """
        self.chunk.remove(position)
        span = self.span_until_now(position)
        del self._began_at[position]
        self._ends_at.pop(position, None)
        if not self.chunk:
            self.deadline = math.inf
        elif self.is_async:
            self.deadline = next(iter(self._ends_at.values()))
        else:  # the process runs the next call from now on
            self.deadline, self._began_at[self.chunk[0]] = time.monotonic() + timeout_s, span[1]
        return span

    def running_calls(self) -> list[int]:
        """Return the indices of the calls that the process runs. A function that is not async runs one at a time."""
        return list(self.chunk) if self.is_async else list(self.chunk)[:1]

    def span_until_now(self, position: int) -> tuple[int, int]:
        """Return (start, now) of a running call, as times of areno.trace."""
        return self._began_at[position], trace.now()

    def exit_text(self) -> str:
        """Wait for the supervisor, and return how the process ended, such as "exit code 3".

        If it has not ended after 5 seconds, the text is "closed its connection".
        """
        try:
            return exit_text(self.process.wait(timeout=EXIT_CODE_S))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def request_stop(self) -> None:
        """Ask the supervisor to end the process and all processes that it started, without waiting."""
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # in case the supervisor is stopped

    def shut_down(self) -> None:
        """End the process and all processes that it started, wait for their end, and close the connection."""
        self.request_stop()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if self._sender is not None:
            self._sender.join(1.0)  # sending fails when the process has ended
        self._printed.join(_LAST_LINES_S)
        self.connection.close()
