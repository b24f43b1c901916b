"""What the processes of users' code print, as log lines: limited for each step, with control characters as escapes."""

from __future__ import annotations

import logging
import threading
from typing import IO

from areno.errors import printable

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
