"""Files and folders that are whole or absent, also after a crash: written under another name, synced, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from areno.errors import ArenoError, CheckpointError, Problem

UNFINISHED = ".tmp-"
REPLACED = ".old-"


def write_whole(final: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder and give it the name `final`. If anything goes wrong, nothing of it stays.

    A folder that had this name is kept until the new one is in place. Errors of the operating system are raised as they
    are. A process that writes files of its own there, such as a worker, must sync them itself; this syncs what
    can be seen from here, and the entries of the folders, without which a file or a new name can be lost in a crash.
    """
    unfinished = final.with_name(f"{UNFINISHED}{final.name}")
    replaced = final.with_name(f"{REPLACED}{final.name}")
    try:
        remove(unfinished)
        unfinished.mkdir(parents=True)
        write(unfinished)
        sync_tree(unfinished)
        if final.exists():
            remove(replaced)
            final.rename(replaced)
        unfinished.rename(final)
        sync(final.parent)
        remove(replaced)
    except BaseException:  # Ctrl-C, too, leaves nothing half
        with suppress(OSError):
            remove(unfinished)
            if replaced.exists() and not final.exists():
                replaced.rename(final)
        raise


@contextmanager
def as_checkpoint_error(folder: Path, what: str, key: str) -> Iterator[None]:
    """Turn an error of the disk into a CheckpointError: "<key>: <folder> cannot <what>: <reason>; ..."."""
    try:
        yield
    except Exception as error:
        # safetensors wraps a full disk in an error of its own, which is no OSError.
        is_disk = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
        names_its_setting = isinstance(error, ArenoError) and any(problem.mentions() for problem in error.problems)
        if not is_disk or names_its_setting:
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        text = "{} cannot {}: {}; free space there or set another folder"
        raise CheckpointError(Problem(key, text, folder, what, reason)) from error


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in `folder`, and itself."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk and not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it. Nothing happens if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
