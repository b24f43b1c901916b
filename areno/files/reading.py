"""Reads files and folders that may be missing, damaged or closed to the user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from areno.errors import ArenoError


def content_of(path: Path) -> bytes | None:
    """Return what is in a file; None if there is none. Raises ArenoError if it cannot be read."""
    return _read(path, -1)


def beginning_of(path: Path, n_bytes: int = 4096) -> bytes:
    """Return the first bytes of a file; none if there is no file. Raises ArenoError if it cannot be read."""
    return _read(path, n_bytes) or b""


def _read(path: Path, n_bytes: int) -> bytes | None:
    """Read a file, or its first bytes. A pipe or a device, which may never end, is refused."""
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
            raise ArenoError("{} cannot be read: it is not a regular file", path)
        with path.open("rb") as file:
            return file.read(n_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArenoError("{} cannot be read: {}", path, error.strerror) from error


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none if there is no folder. Raises ArenoError if it cannot be read."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArenoError("{} cannot be read: {}", folder, error.strerror) from error
