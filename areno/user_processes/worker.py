"""Control one process of user code from the driver.

`Worker` starts the process, sends it calls, keeps its deadline and ends it. `Output` writes the lines that the
processes print to the log, with control characters escaped and up to a limit for each step.
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

_MAX_BYTES = 2**18  # printed by all processes of a pool in one step
_PREFIX_BYTES = 64  # written by the log before each line
_LINE_BYTES = 4096  # a longer line is split


class Output:
    """Logs the lines that all processes of a pool print.

    Args:
        name: Name of the pool, which begins each line.
    """

    def __init__(self, name: str):
        self._name, self._lock, self._left = name, threading.Lock(), _MAX_BYTES

    def begin_step(self) -> None:
        """Reset the limit on printed bytes at the start of a step."""
        with self._lock:
            self._left = _MAX_BYTES

    def log(self, printed: IO[bytes]) -> None:
        """Log the output of a process until it and all processes that it started have ended.

        Output over the limit is dropped.

        Args:
            printed: Pipe of the process's output.
        """
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
_END_S = 10.0  # for a keeper to end
EXIT_CODE_S = 5.0  # for a keeper's exit code after its process has closed the connection
_LAST_LINES_S = 1.0  # for the last printed lines, whose pipe may be held open by a process that could not be killed
_HELD_BYTES = 1 << 16 if sys.platform == "linux" else 0  # buffered by the system for a socket that is not read


class Worker:
    """One process of user code: starting, idle (no chunk), or busy with `chunk` until `deadline`.

    Args:
        first_message: The user code and its options.
        import_limit_s: Seconds for the import of the user code.
        module: Module whose `serve` runs in the process.
        output: Logs the lines that it prints.

    Attributes:
        connection: Connection to the process.
        process: The keeper of the process.
        chunk: Numbers of the calls that it has not answered.
        sent: Number of calls of the last chunk.
        is_async: Whether the user's function is async.
        is_starting: Whether the import has not finished.
        deadline: Time of `time.monotonic` by which it must answer.
    """

    def __init__(self, first_message: tuple[Any, ...], import_limit_s: float, module: str, output: Output):
        self.connection, theirs = Pipe()
        # Not multiprocessing: its children would import the driver's main module and all that this imports.
        fd = theirs.fileno()
        start = f"from areno.user_processes.keeper import main; main({fd}, {os.getpid()}, {module!r})"
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
        with theirs:
            # In a session of its own, so that Ctrl-C does not reach it.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # not the run's, which processes of the user code would hold open
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
        """Whether the process has started and has no calls left."""
        return not self.is_starting and not self.chunk

    def send(self, chunk: list[tuple[int, bytes]], timeout_s: float) -> None:
        """Send calls.

        Args:
            chunk: (number, pickled arguments) of each call. Empty sends nothing.
            timeout_s: Time limit for the first answer, and for all answers if the function is async.
        """
        if not chunk:
            return
        self.chunk = deque(position for position, _ in chunk)
        self.sent = len(chunk)
        self._post(chunk)
        self.deadline = time.monotonic() + timeout_s + (ASYNC_SPARE_S if self.is_async else 0.0)

    def _post(self, message: Any) -> None:
        """Send a message. A large one is sent in a thread, since a process that hangs does not read it."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

        def send() -> None:
            with contextlib.suppress(OSError):  # the process is dead; reading from it will show that
                self.connection.send_bytes(data)

        if len(data) <= _HELD_BYTES:  # fits the buffer, which is empty, as all earlier messages were answered
            return send()
        self._sender = threading.Thread(target=send, daemon=True)
        self._sender.start()

    def answered(self, position: int, timeout_s: float) -> None:
        """Remove an answered call and set the next deadline.

        Args:
            position: Number of the call.
            timeout_s: Time limit for the next answer.
        """
        self.chunk.remove(position)
        if not self.chunk:
            self.deadline = math.inf
        elif not self.is_async:  # the process runs the next call from now on
            self.deadline = time.monotonic() + timeout_s

    def exit_text(self) -> str:
        """Describe the end of the process."""
        try:
            return exit_text(self.process.wait(timeout=EXIT_CODE_S))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def stop(self) -> None:
        """Tell the keeper to end the process and all processes that it started, without waiting."""
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # in case the keeper is stopped

    def end(self) -> None:
        """End the process and all processes that it started, and wait for it."""
        self.stop()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if self._sender is not None:
            self._sender.join(1.0)  # sending fails when the process has ended
        self._printed.join(_LAST_LINES_S)
        self.connection.close()
