"""A process that makes rows when they are read.

Some generators take a second for a row, and what others make depends on the hash seed of their process. So rows come
from a process with a fixed hash seed, in the background.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from areno.errors import DataError
from areno.files.user_code import describe_error

LIMIT_S = 60.0
_SERVE = "from areno.environments.rows_process import serve; serve()"


class RowsProcess:
    """A process for the rows of a package. It starts with the first call, and again after one that took too long."""

    def __init__(self, package: str):
        self._package, self._lock = package, threading.Lock()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a module in the process. Raises DataError if it fails, or takes longer than LIMIT_S."""
        with self._lock:
            process = self._process
            requests, answers = process.stdin, process.stdout
            assert requests is not None
            assert answers is not None
            try:
                pickle.dump((function, args), requests)
                requests.flush()
                if not select.select([answers], [], [], LIMIT_S)[0]:
                    self._restart()
                    raise DataError("{} takes longer than {:g} s to make a row", self._package, LIMIT_S)
                found, error = pickle.load(answers)
            except (OSError, EOFError, pickle.UnpicklingError) as ended:
                self._restart()
                raise DataError("the process that makes rows of {} ended", self._package) from ended
            except (KeyboardInterrupt, SystemExit):  # its answer would be taken for that to the next call
                self._restart()
                raise
        if error:
            raise DataError("{} cannot make a row: {}", self._package, error)
        return found

    def _restart(self) -> None:
        _end(self.__dict__.pop("_process"))

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


@cache
def rows_process(package: str) -> RowsProcess:
    return RowsProcess(package)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may be in the middle of a row, and that has nothing to clean up."""
    process.kill()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what it has not read is lost
            if stream is not None:
                stream.close()
    process.wait()


def serve() -> None:
    """Answer requests (function, arguments) from stdin with (result, "") or (None, error)."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # generators print
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, args = pickle.load(requests)
            try:
                answer: tuple[Any, str] = function(*args), ""
            except Exception as error:  # the code of packages may raise anything
                answer = None, describe_error(error)
            pickle.dump(answer, answers)
            answers.flush()
