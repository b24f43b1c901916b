"""Files and folders that are whole or absent, also after a crash: written under another name, synced, then renamed.

One piece of work at a time in a thread, whose error comes to whoever waits for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, CheckpointError, Problem
from areno.files.interrupts import SIGNALS, handled

UNFINISHED = ".tmp-"
REPLACED = ".old-"


def write_whole(final: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder and give it the name `final`: see `whole`."""
    with whole(final) as folder:
        write(folder)


@contextmanager
def whole(final: Path, then: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """A folder to fill, which gets the name `final` at the end. If anything goes wrong, nothing of it stays.

    A folder that had this name is kept until the new one is in place. Where the name is a link, the folder that it
    points to is replaced. then: called when the folder has its name; Ctrl-C and SIGTERM wait until it has returned.

    Errors of the operating system are raised as they are, and an OSError where another process writes to `final`.
    A process that writes files of its own there, such as a worker, must sync them itself; this syncs what
    can be seen from here, and the entries of the folders, without which a file or a new name can be lost in a crash.
    """
    if final.is_symlink():
        final = Path(os.path.realpath(final))
    unfinished = final.with_name(f"{UNFINISHED}{final.name}")
    replaced = final.with_name(f"{REPLACED}{final.name}")
    unfinished.mkdir(parents=True, exist_ok=True)
    with locked(unfinished):
        try:
            for left in unfinished.iterdir():  # by a crash
                remove(left)
            yield unfinished
            sync_tree(unfinished)
            with interrupts_held():
                if final.exists():
                    remove(replaced)
                    final.rename(replaced)
                unfinished.rename(final)
                sync(final.parent)
                then()
            remove(replaced)
        except BaseException:  # Ctrl-C, too, leaves nothing half
            with suppress(OSError):
                remove(unfinished)
                if replaced.exists() and not final.exists():
                    replaced.rename(final)
            raise


def remove_whole(folder: Path) -> None:
    """Remove a folder so that a crash leaves all of it or nothing under its name. OSError where that cannot be."""
    removed = folder.with_name(f"{UNFINISHED}{folder.name}")
    remove(removed)
    folder.rename(removed)
    sync(folder.parent)
    remove(removed)


def write_text_whole(path: Path, text: str) -> None:
    """Write a small file, which then holds this text, also after a crash, or what it held before."""
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder, which is free again after a crash. OSError if another process holds it.

    On a file system without locks it is not held.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, "another process is writing there") from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGUSR1 take effect at the end. Only the main thread gets them."""
    came: list[int] = []
    try:
        with handled(lambda number, _: came.append(number), *SIGNALS):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def make_folders(folder: Path, exist_ok: bool = True) -> list[Path]:
    """Make a folder and its parents. Those that were not there, innermost first. An OSError leaves none of them."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:  # possibly since a moment ago, by another run
        raise
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove those folders that are empty, in this order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


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


class Background:
    """Work beside other work. name: of the thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._work: Future[Any] | None = None

    def start(self, work: Callable[..., object], *args: Any) -> None:
        """Begin, when what was begun before has ended. Raises as `settle` does."""
        self.settle()
        self._work = self._thread.submit(work, *args)

    def settle(self) -> None:
        """Wait for the end of what was begun. Raises, once, what it has raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """The same, for good."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
