"""Reads files and folders that may be missing, damaged or closed to the user."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from areno.errors import ArenoError


def content_of(path: Path) -> bytes | None:
    """What is in a file, None where there is none. ArenoError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArenoError("{} cannot be read: {}", path, error.strerror) from error


def names_in(folder: Path) -> list[str]:
    """What is in a folder, nothing where there is none. ArenoError if it cannot be read."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArenoError("{} cannot be read: {}", folder, error.strerror) from error


def yaml_fault(error: BaseException) -> str:
    """An error of the YAML reader as one line."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"line {mark.line + 1}: {error.problem or error.context}"
    if isinstance(error, OSError):
        return str(error.strerror)
    return " ".join(str(error).split())
