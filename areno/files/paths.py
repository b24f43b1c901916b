"""Where files are: beside the user's working directory, or among those that come with areno.

Reads files and folders that may be missing, damaged or closed to the user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areno.errors import ArenoError, CheckpointError, ConfigError, Problem


def root() -> Path:
    """The folder that holds conf/, recipes/ and examples/: the repository in a clone, areno/_data in a wheel."""
    package = Path(__file__).resolve().parents[1]
    data = package / "_data"
    return data if data.is_dir() else package.parent


def existing_path(path: str | Path) -> Path | None:
    """`path` as an absolute path, looked up from the working directory and then from `root()`; None if in neither."""
    path = Path(os.path.expanduser(path))
    for base in (Path.cwd(), root()):
        if os.path.exists(base / path):  # False, and no error, also for a name that is too long
            return (base / path).absolute()
    return None


def absolute(folder: str | Path | None) -> Path | None:
    """Return a folder as an absolute path with `~` expanded; None where none is given."""
    return Path(os.path.expanduser(folder)).absolute() if folder else None


@contextmanager
def model_of(key: str) -> Iterator[None]:
    """Around code that reads the model folder or hub id of the setting `key`: a CheckpointError then names it.

    The models themselves assume that a model comes from actor.path. An error that does not name it gets `key` in front.
    """
    try:
        yield
    except CheckpointError as error:
        found = error.renamed({"actor.path": key}.get).problems
        problems = [p if key in p.mentions() else Problem(p.key or key, p.template, *p.args) for p in found]
        raise CheckpointError(problems) from error


def find_file(path: str | Path, key: str = "") -> Path:
    """Like `existing_path`, but a path that is in neither place is a ConfigError of the setting `key`."""
    found = existing_path(path)
    if found is None:
        places = "" if os.path.isabs(os.path.expanduser(path)) else f", neither in {Path.cwd()} nor in {root()}"
        raise ConfigError(Problem(key, f"there is no {str(path)!r}{places}"))
    return found


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
