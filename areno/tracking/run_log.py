"""Handlers that send the log lines of a run to stderr and logs/run.log, beside the logging of the host program."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from pathlib import Path
from typing import Any, ClassVar, Literal

from areno.errors import ConfigError, Problem

logger = logging.getLogger("areno")

_MAX_EARLIER_LINES = 1000  # lines that are kept until the log file is open
Console = Literal["live", "lines", "full", "quiet"]
"""The kinds of lines that stderr shows, as described for the setting stats_logger.console."""
IN_FULL: dict[str, Any] = {"consoles": ("full",)}
"""The argument `extra` for a log line that only the console `full` shows. logs/run.log contains the line, too."""
OF_STEP: dict[str, Any] = {"consoles": ("full", "lines")}
"""The argument `extra` for a log line that the consoles `full` and `lines` show. The live display has its own form."""


class RunLog:
    """Sends areno's log records to stderr and to a file until `close`. It is also a context manager.

    A host program that imports areno keeps its own logging handlers and the level of the logger "areno". If a handler
    of the host program receives areno's records, areno itself writes nothing to stderr, so that no line appears twice.
    Several RunLogs may be open at once. The last `close` restores stderr and the level.

    Commands of areno set `own_process`: records then do not go to handlers of parent loggers. `current_console` decides
    which lines stderr shows. Without it, the `current_console` of the RunLog opened before counts.
    """

    _open: ClassVar[list[RunLog]] = []  # the open logs, which share the handler for stderr and the level
    _has_set_level: ClassVar[bool] = False

    def __init__(
        self, log_file: str | Path | None = None, *, own_process: bool = False, console: Console | None = None
    ):
        self._own_process, self._propagate_before = own_process, logger.propagate
        self.console: Console | None = console
        self._file: logging.Handler | None = None
        self._earlier: _BufferingHandler | None = None
        if log_file is None:
            self._earlier = _BufferingHandler()
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
            for log in RunLog._open:  # from now on, the file has the lines
                if log._earlier is not None:
                    logger.removeHandler(log._earlier)
        logger.addHandler(_STDERR)  # no effect for a handler that the logger has
        RunLog._open.append(self)
        if own_process:
            logger.propagate = False
        # If the host program receives the records and no log file is asked for, the host's own level applies.
        if logger.level == logging.NOTSET and (log_file is not None or not has_host_handler()):
            RunLog._has_set_level = True
            logger.setLevel(logging.INFO)

    def write_buffered(self) -> None:
        """Write to the log file the lines that were logged before it was opened."""
        without_file = [log for log in RunLog._open if log._earlier is not None]
        source = next((log for log in without_file if log._own_process), without_file[-1] if without_file else None)
        if self._file is not None and source is not None and source._earlier is not None:
            source._earlier.replay_to(self._file)

    def close(self) -> None:
        """Remove the handlers. Later calls do nothing."""
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


class ArenoHandler(logging.Handler):
    """Base class of all logging handlers that areno installs. `has_host_handler` ignores them."""


class _BufferingHandler(ArenoHandler):
    """Keeps the last records in memory until a log file is opened."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[logging.LogRecord] = deque(maxlen=_MAX_EARLIER_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def replay_to(self, other: logging.Handler) -> None:
        while self._records:
            other.handle(self._records.popleft())


class _StderrHandler(ArenoHandler):
    """Writes to the current `sys.stderr`, which the live display replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_hidden(record) or has_host_handler():
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _FileHandler(ArenoHandler, logging.FileHandler):
    """Warns once and is removed if its file cannot be written. The run continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        logger.removeHandler(self)
        with contextlib.suppress(OSError):
            self.close()
        logger.warning("%s cannot be written any more: %s", self.baseFilename, error)


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            return f"{record.asctime} {record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


_FORMATTER = _Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
_STDERR = _StderrHandler()
_STDERR.setFormatter(_FORMATTER)


def current_console() -> Console:
    for log in reversed(RunLog._open):
        if log.console is not None:
            return log.console
    return "full"


def is_hidden(record: logging.LogRecord) -> bool:
    """Return whether the current console hides a record on stderr. Warnings and errors are never hidden."""
    if record.levelno >= logging.WARNING:
        return False
    shown = current_console()
    return shown == "quiet" or shown not in vars(record).get("consoles", (shown,))


def has_host_handler() -> bool:
    """Return whether a logging handler of the host program receives areno's records."""
    place: logging.Logger | None = logger
    while place is not None:
        if any(not isinstance(handler, ArenoHandler) for handler in place.handlers):
            return True
        place = place.parent if place.propagate else None
    return False
