"""What a run says: plain `HH:MM:SS text` lines on stderr, and a progress bar where there is a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from areno.errors import ConfigError, Problem

logger = logging.getLogger("areno")


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the moment: a progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Gives a log up that cannot be written, and says so once. Whether the run goes on is not for the log to decide."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        logger.removeHandler(self)
        with contextlib.suppress(OSError):
            self.close()
        logger.warning("%s cannot be written any more: %s", self.baseFilename, error)


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            return f"{record.asctime} {record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


def setup_logging(log_file: str | Path | None = None, level: int = logging.INFO) -> None:
    """Send areno's log lines to stderr, and to `log_file` too if one is given. Calling it again starts anew.

    Raises ConfigError if the file cannot be made.
    """
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_StderrHandler()]
    if log_file is not None:
        try:
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_FileHandler(log_file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError([Problem("cluster.fileroot", f"cannot write {log_file}: {error.strerror}")]) from error
    for handler in handlers:
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def log_epoch(epoch: int, stage: str) -> None:
    """`epoch=0 stage=epoch_start`; stage is start or end."""
    logger.info("epoch=%d stage=epoch_%s", epoch, stage)


def log_stage(stage: str, role: str = "policy") -> None:
    """`role=policy stage=rollout_start`; stage is rollout_start, rollout_end, train_start, train_end, ..."""
    logger.info("role=%s stage=%s", role, stage)


def log_metric(name: str, value: float) -> None:
    """`metric=reward_mean value=0.125000`"""
    logger.info("metric=%s value=%.6f", name, value)


def log_train_stats(stats: Mapping[str, float]) -> None:
    """`train_stats={'loss': 0.0, ...}`"""
    logger.info("train_stats=%s", dict(stats))


def log_times(rollout: float, train: float, total: float) -> None:
    """`time rollout=213.929721 train=17.327612 total=231.297132`, in seconds."""
    logger.info("time rollout=%.6f train=%.6f total=%.6f", rollout, train, total)


class Progress:
    """How far a rollout is, or scoring: prompts or pairs done, tokens a second, mean reward. Use as a context manager.

    On a terminal a bar that disappears at the end; elsewhere a log line at most every `interval_s` seconds.
    """

    def __init__(self, title: str, total: int, interval_s: float = 10.0, unit: str = "prompts"):
        self.title = title
        self.total = total
        self.interval_s = interval_s
        self.unit = unit
        self._started = self._said_at = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self._started = self._said_at = time.monotonic()
        if sys.stderr.isatty():
            self._bar = _rich_bar()
            self._bar.start()
            self._bar.add_task(self.title, total=self.total, state="")
        return self

    def update(self, done: int, tokens: int = 0, reward: float | None = None) -> None:
        """What is done and how many tokens of it there are so far, and the mean reward if some is known."""
        now = time.monotonic()
        rate = tokens / max(now - self._started, 1e-9)
        if self._bar is not None:
            shown = f"{rate:,.0f} tok/s" + ("" if reward is None else f"  reward {reward:.3f}")
            self._bar.update(self._bar.task_ids[0], completed=done, state=shown)
        elif now - self._said_at >= self.interval_s:
            self._said_at = now
            text = f"{self.title} progress: {self.unit}={done}/{self.total} tokens_per_second={rate:.1f}"
            logger.info(text + ("" if reward is None else f" reward_mean={reward:.6f}"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
