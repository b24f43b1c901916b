"""Functions that find files of users and of areno, and that read files which may be missing or damaged."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from areno.errors import ArenoError, CheckpointError, ConfigError, Problem


def data_root() -> Path:
    """Return the folder that holds conf/, recipes/ and examples/: the repository in a clone, areno/_data in a wheel."""
    package = Path(__file__).resolve().parents[1]
    data = package / "_data"
    return data if data.is_dir() else package.parent


def existing_path(path: str | Path) -> Path | None:
    """Find a path (`~` is expanded) in the working directory, else in `data_root()`. Return it as absolute, or None."""
    path = Path(os.path.expanduser(path))
    for base in (Path.cwd(), data_root()):
        if os.path.exists(base / path):  # unlike Path.exists, False for a name that is too long
            return (base / path).absolute()
    return None


def absolute_or_none(folder: str | Path | None) -> Path | None:
    """Return a folder as an absolute path with `~` expanded, or None for None or ""."""
    return Path(os.path.expanduser(folder)).absolute() if folder else None


@contextmanager
def name_model_setting_in_errors(key: str) -> Iterator[None]:
    """Let CheckpointErrors of a `with` block name the setting `key`.

    The code that reads models raises errors about the setting actor.path. Use this function where the model comes from
    another setting. In their messages, `key` replaces actor.path, and is added to problems that name no setting.
    """
    try:
        yield
    except CheckpointError as error:
        found = error.renamed({"actor.path": key}.get).problems
        problems = [p if key in p.mentions() else Problem(p.key or key, p.template, *p.args) for p in found]
        raise CheckpointError(problems) from error


def find_file(path: str | Path, key: str = "") -> Path:
    """Return `existing_path(path)`. Raises a ConfigError about the setting `key` if there is no such path."""
    found = existing_path(path)
    if found is None:
        places = "" if os.path.isabs(os.path.expanduser(path)) else f", neither in {Path.cwd()} nor in {data_root()}"
        raise ConfigError(Problem(key, f"there is no {str(path)!r}{places}"))
    return found


def read_if_exists(path: Path) -> bytes | None:
    """Return the bytes of a file, or None if it does not exist. Raises ArenoError if it is not regular or readable."""
    return _read_bytes(path, -1)


def read_first_bytes(path: Path, n_bytes: int = 4096) -> bytes:
    """Return the first bytes of a file, or b"" if it does not exist. Raises the errors of `read_if_exists`."""
    return _read_bytes(path, n_bytes) or b""


def _read_bytes(path: Path, n_bytes: int) -> bytes | None:
    with open_if_exists(path) as file:
        return None if file is None else file.read(n_bytes)


@contextmanager
def open_if_exists(path: Path) -> Iterator[BinaryIO | None]:
    """Open a file for reading. Yields None if it does not exist. Raises ArenoError if it is not regular or readable."""
    with ExitStack() as stack:
        try:
            if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
                raise ArenoError("{} cannot be read: it is not a regular file", path)
            file = stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            file = None
        except OSError as error:
            raise ArenoError("{} cannot be read: {}", path, error.strerror) from error
        try:
            yield file
        except OSError as error:
            raise ArenoError("{} cannot be read: {}", path, error.strerror) from error


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder, or [] if it does not exist. Raises ArenoError if it cannot be read."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArenoError("{} cannot be read: {}", folder, error.strerror) from error
