"""When something is due (Trigger), and how a checkpoint gets onto the disk whole or not at all (write_whole, Saver).

A checkpoint is written into `.tmp-step-<n>`, flushed to the disk and renamed to `step-<n>`: a folder of that name is
whole. `latest` is a link to the newest one.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from areno.config.run import FrequencyConfig, SaverConfig
from areno.errors import ArenoError, CheckpointError

logger = logging.getLogger("areno.saver")

_UNFINISHED = ".tmp-"
_REPLACED = ".old-"
_KEY = "saver.path"


class Trigger:
    """Says when something with a FrequencyConfig is due. Steps count from 1."""

    def __init__(self, config: FrequencyConfig, now: float | None = None):
        self.config = config
        self.epochs_ended = 0
        self._last = time.monotonic() if now is None else now

    def due(self, step: int, epoch_ended: bool = False, now: float | None = None) -> bool:
        """To be asked once after each step. `epoch_ended`: it was the last of an epoch. `now`: seconds, any origin."""
        now = time.monotonic() if now is None else now
        config = self.config
        self.epochs_ended += epoch_ended
        is_due = (
            (config.freq_steps is not None and step % config.freq_steps == 0)
            or (config.freq_epochs is not None and epoch_ended and self.epochs_ended % config.freq_epochs == 0)
            or (config.freq_secs is not None and now - self._last >= config.freq_secs)
        )
        if is_due:
            self._last = now
        return is_due


def write_whole(final: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder and give it the name `final`: all of it or, where anything goes wrong, nothing.

    A folder of that name makes way at the last moment. What the operating system reports is raised as it is.
    """
    unfinished = final.with_name(f"{_UNFINISHED}{final.name}")
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    try:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        write(unfinished)
        _sync_tree(unfinished)
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        _remove(replaced)
        _sync(final.parent)
    except BaseException:  # Ctrl-C, too, leaves nothing half
        with suppress(OSError):
            _remove(unfinished)
        raise


@contextmanager
def explained(folder: Path, what: str, key: str) -> Iterator[None]:
    """Turn what the operating system, or a library that writes, reports into a CheckpointError naming the key."""
    try:
        yield
    except Exception as error:
        # safetensors wraps a full disk in an error of its own, which is no OSError.
        is_disk = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
        if not is_disk or (isinstance(error, ArenoError) and not isinstance(error, CheckpointError)):
            raise
        if "saver.path" in str(error):  # the engine has said it all
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{key}: {folder} cannot {what}: {reason}; free space there or set another folder"
        ) from error


class Saver:
    """Writes checkpoints of one run. default_dir: where, unless saver.path says otherwise."""

    def __init__(self, config: SaverConfig, default_dir: str | Path):
        self.folder = Path(default_dir if config.path is None else config.path).expanduser()
        self.trigger = Trigger(config)
        self.saved_step: int | None = None

    def check_writable(self) -> None:
        """Make the folder, write in it, and clear away what a crash left there. Raises CheckpointError."""
        with explained(self.folder, "be written", _KEY):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{_UNFINISHED}step-probe").write_bytes(b"x")
            for replaced in self.folder.glob(f"{_REPLACED}step-*"):
                final = self.folder / replaced.name.removeprefix(_REPLACED)
                if final.exists():
                    _remove(replaced)
                else:  # the crash came between its going and the new one's coming
                    replaced.rename(final)
            for unfinished in self.folder.glob(f"{_UNFINISHED}step-*"):
                _remove(unfinished)

    def due(self, step: int, epoch_ended: bool = False, now: float | None = None) -> bool:
        """Whether to save after this step; see Trigger."""
        return self.trigger.due(step, epoch_ended, now)

    def save(self, write: Callable[[Path], object], step: int) -> Path:
        """Let `write` fill a folder, and give it the name step-<n>. Raises CheckpointError and leaves nothing."""
        final = self.folder / f"step-{step:06d}"
        with explained(self.folder, "hold the checkpoint", _KEY):
            write_whole(final, write)
            self._link(final)
        self.saved_step = step
        logger.info("checkpoint saved: %s", final)
        return final

    def _link(self, final: Path) -> None:
        link = self.folder / f"{_UNFINISHED}latest"
        try:
            _remove(link)
            link.symlink_to(final.name, target_is_directory=True)
            link.replace(self.folder / "latest")
        except OSError as error:  # some file systems know no links; the checkpoint itself is there
            logger.warning("%s could not be linked to %s: %s", self.folder / "latest", final.name, error.strerror)
        _sync(self.folder)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    """Have the file or folder on the disk, not only in memory, before it gets its final name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
