"""The log lines of a run on stderr and in logs/run.log, without a change to the logging of the host program."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from pathlib import Path
from typing import Any, ClassVar, Literal

from areno.errors import ConfigError, Problem

logger = logging.getLogger("areno")

_MOST_EARLIER = 1000  # lines that are kept until there is a file for them
Console = Literal["live", "lines", "full", "quiet"]
"""What stderr shows of a run: see stats_logger.console."""
IN_FULL: dict[str, Any] = {"consoles": ("full",)}
"""For `extra` of a log call: only the console `full` shows the line, and logs/run.log has it."""
OF_STEP: dict[str, Any] = {"consoles": ("full", "lines")}
"""Likewise for what the live display tells in its own way."""


class RunLog:
    """Sends what areno logs to stderr, and to `log_file` if one is given, until close(). Also a context manager.

    The host program keeps its own logging: its handlers, and a level that it has set on the logger "areno". While it
    has a handler that gets areno's records, nothing of ours goes to stderr, so no line appears twice. own_process:
    there is no host, as under a command line of ours; stderr gets the lines, and handlers of other loggers do not.

    console: which of the lines stderr gets; None: what an outer one says. Of several that are open the last counts.

    Several may be open; the last close() restores stderr and the level. Raises ConfigError if the file cannot be made.
    """

    _open: ClassVar[list[RunLog]] = []  # they share the handler for stderr and the level
    _has_set_level: ClassVar[bool] = False

    def __init__(
        self, log_file: str | Path | None = None, *, own_process: bool = False, console: Console | None = None
    ):
        self._own_process, self._propagate_before = own_process, logger.propagate
        self.console: Console | None = console
        self._file: logging.Handler | None = None
        self._earlier: _EarlierHandler | None = None
        if log_file is None:
            self._earlier = _EarlierHandler()
            logger.addHandler(self._earlier)
        else:
            try:
                Path(log_file).parent.mkdir(parents=True, exist_ok=True)
                self._file = _FileHandler(log_file, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                text = "cannot write {}: {}"
                raise ConfigError(Problem("cluster.fileroot", text, log_file, error.strerror)) from error
            self._file.setFormatter(_FORMATTER)
            logger.addHandler(self._file)
            for log in RunLog._open:  # it has the lines from here on
                if log._earlier is not None:
                    logger.removeHandler(log._earlier)
        logger.addHandler(_STDERR)  # no effect if it is there
        RunLog._open.append(self)
        if own_process:
            logger.propagate = False
        # A host that listens and asked for no file gets the records that its own level lets through.
        if logger.level == logging.NOTSET and (log_file is not None or not host_listens()):
            RunLog._has_set_level = True
            logger.setLevel(logging.INFO)

    def write_earlier(self) -> None:
        """Write the lines of the command or, in a script, of the loop that were logged before the file was opened."""
        without_file = [log for log in RunLog._open if log._earlier is not None]
        source = next((log for log in without_file if log._own_process), without_file[-1] if without_file else None)
        if self._file is not None and source is not None and source._earlier is not None:
            source._earlier.give_to(self._file)

    def close(self) -> None:
        """Undo what this one did. A second call does nothing."""
        if self not in RunLog._open:
            return
        RunLog._open.remove(self)
        if self._earlier is not None:
            logger.removeHandler(self._earlier)
        if self._file is not None:
            logger.removeHandler(self._file)
            self._file.close()
        if self._own_process:
            logger.propagate = self._propagate_before
        if not RunLog._open:
            logger.removeHandler(_STDERR)
            if RunLog._has_set_level and logger.level == logging.INFO:
                logger.setLevel(logging.NOTSET)
            RunLog._has_set_level = False

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class OwnHandler(logging.Handler):
    """Base of areno's own handlers, which are no host that listens."""


class _EarlierHandler(OwnHandler):
    """Keeps the last records until there is a file for them."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[logging.LogRecord] = deque(maxlen=_MOST_EARLIER)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def give_to(self, other: logging.Handler) -> None:
        """Let another handler have the records, once."""
        while self._records:
            other.handle(self._records.popleft())


class _StderrHandler(OwnHandler):
    """Writes to what `sys.stderr` is at the moment: a display replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_hidden(record) or host_listens():
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _FileHandler(OwnHandler, logging.FileHandler):
    """Gives up a log that cannot be written, and says so once. The run goes on without it."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        logger.removeHandler(self)
        with contextlib.suppress(OSError):
            self.close()
        logger.warning("%s cannot be written any more: %s", self.baseFilename, error)


class _Formatter(logging.Formatter):
    """Puts the level in front of warnings and errors."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            return f"{record.asctime} {record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


_FORMATTER = _Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
_STDERR = _StderrHandler()
_STDERR.setFormatter(_FORMATTER)


def console() -> Console:
    """The console that counts."""
    for log in reversed(RunLog._open):
        if log.console is not None:
            return log.console
    return "full"


def is_hidden(record: logging.LogRecord) -> bool:
    """Whether the console does not show this record."""
    if record.levelno >= logging.WARNING:
        return False
    shown = console()
    return shown == "quiet" or shown not in vars(record).get("consoles", (shown,))


def host_listens() -> bool:
    """Whether a handler that is not ours gets areno's records."""
    place: logging.Logger | None = logger
    while place is not None:
        if any(not isinstance(handler, OwnHandler) for handler in place.handlers):
            return True
        place = place.parent if place.propagate else None
    return False
