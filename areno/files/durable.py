"""Write files and folders atomically: after a crash they are complete or absent."""

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
from areno.files.interrupts import SIGNALS, signal_handlers

UNFINISHED = ".tmp-"
REPLACED = ".old-"


def atomic_write_folder(final: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary folder, then rename the folder to `final`. `atomic_folder` has the details."""
    with atomic_folder(final) as folder:
        write(folder)


@contextmanager
def atomic_folder(final: Path, then: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Yield a temporary folder. At the end of the block, rename it to `final`, or remove it after an error.

    An existing folder `final` is kept until the new one is in place. If `final` is a link, the folder that it points to
    is replaced. All files in the folder that this process can see are synced to the disk. A process on another machine
    that writes into the folder must sync its files itself. `then` is called right after the rename, and Ctrl-C, SIGTERM
    and SIGUSR1 are delayed until it has returned. Raises OSError if another process is writing to `final`.
    """
    if final.is_symlink():
        final = Path(os.path.realpath(final))
    unfinished = final.with_name(f"{UNFINISHED}{final.name}")
    replaced = final.with_name(f"{REPLACED}{final.name}")
    unfinished.mkdir(parents=True, exist_ok=True)
    with locked(unfinished):
        try:
            for leftover in unfinished.iterdir():  # from a crash
                remove(leftover)
            yield unfinished
            sync_tree(unfinished)
            with delay_interrupts():
                if final.exists():
                    remove(replaced)
                    final.rename(replaced)
                unfinished.rename(final)
                sync(final.parent)
                then()
            remove(replaced)
        except BaseException:  # also after Ctrl-C
            with suppress(OSError):
                remove(unfinished)
                if replaced.exists() and not final.exists():
                    replaced.rename(final)
            raise


def atomic_remove(folder: Path) -> None:
    """Remove a folder. After a crash, the folder is either complete or absent."""
    removed = folder.with_name(f"{UNFINISHED}{folder.name}")
    remove(removed)
    folder.rename(removed)
    sync(folder.parent)
    remove(removed)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a small text file in UTF-8. After a crash, it has either the old or the new text."""
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
    """Hold an exclusive lock on a file or folder. Raises OSError if another process holds it.

    A crash releases the lock. On a file system without locks, nothing is locked.
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
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGUSR1 until the end of the block. Does nothing outside the main thread."""
    received: list[int] = []
    try:
        with signal_handlers(lambda number, _: received.append(number), *SIGNALS):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


def make_folders(folder: Path, exist_ok: bool = True) -> list[Path]:
    """Make a folder and its missing parents. Returns the new folders, innermost first. On an error, removes them."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:  # another run may have just made it
        raise
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def as_checkpoint_error(folder: Path, action: str, key: str) -> Iterator[None]:
    """Convert a disk error (OSError or SafetensorError) in the block to a CheckpointError.

    The message is "<key>: <folder> cannot <action>: <reason>; ...", where `key` is the setting that names the folder.
    """
    try:
        yield
    except Exception as error:
        # safetensors reports a full disk by an error of its own, which is not an OSError.
        is_disk = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
        names_its_setting = isinstance(error, ArenoError) and any(problem.mentions() for problem in error.problems)
        if not is_disk or names_its_setting:
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        text = "{} cannot {}: {}; free space there or set another folder"
        raise CheckpointError(Problem(key, text, folder, action, reason)) from error


def sync_tree(folder: Path) -> None:
    """Wait until a folder and all files below it are written to the disk (fsync)."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file is written to the disk (fsync). For a folder, this means the list of names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class BackgroundCall:
    """Runs one function call at a time in a background thread. If it fails, the next method raises the error."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._work: Future[Any] | None = None

    def start(self, work: Callable[..., object], *args: Any) -> None:
        """Wait for the previous call, then start a new one."""
        self.wait()
        self._work = self._thread.submit(work, *args)

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
