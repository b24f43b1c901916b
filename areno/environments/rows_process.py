"""A process that makes rows when they are read.

Some generators take a second for a row, and what others make depends on the hash seed of their process. So rows come
from a process with a fixed hash seed, in the background.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

from areno.errors import DataError, EngineError
from areno.files.user_code import describe_error

_SERVE = "from areno.environments.rows_process import serve; serve()"


class RowsProcess:
    """A process that starts with the first call, and ends with this object."""

    def __init__(self, name: str):
        self._name, self._lock = name, threading.Lock()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a module in the process. Raises DataError if it fails."""
        with self._lock:
            requests, answers = self._process.stdin, self._process.stdout
            assert requests is not None
            assert answers is not None
            try:
                pickle.dump((function, args), requests)
                requests.flush()
                found, error = pickle.load(answers)
            except (OSError, EOFError) as ended:
                raise EngineError("the process that makes the rows of {} ended", self._name) from ended
        if error:
            raise DataError("{} cannot make a row: {}", self._name, error)
        return found

    @cached_property
    def _process(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may be in the middle of a row, and that has nothing to clean up."""
    process.kill()
    process.communicate()


def serve() -> None:
    """Answer requests (function, arguments) from stdin with (result, "") or (None, error)."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # generators print
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, args = pickle.load(requests)
            try:
                answer: tuple[Any, str] = function(*args), ""
            except Exception as error:  # the code of packages may raise anything
                answer = None, describe_error(error)
            pickle.dump(answer, answers)
            answers.flush()
