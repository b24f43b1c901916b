"""Reads YAML that users and other machines wrote, after a check that it is small.

A few lines can stand for billions of values: an alias repeats the part of the file that it names. The check counts
values with their aliases written out, before any value is made, so its work is linear in the length of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from areno.files.durable import interrupts_held
from areno.files.paths import beginning_of

MOST_BYTES = 2**20
MOST_VALUES = 10_000
MOST_LEVELS = 32
_MOST_CHARACTERS = 10_000  # of a value that the readers of numbers and of ${...} look at: they are slow
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, where PyYAML has it


class YamlFault(ValueError):
    """YAML that cannot be read, or is too large. The message is one line without the name of the file."""


def plain_yaml(path: Path) -> Any:
    """Return the values of a YAML file as dictionaries, lists and scalars.

    Numbers are read as Hydra reads them, so 1e-6 is a float. Interpolations stay as they are written.

    Returns:
        The values; None if there is no file, or nothing in it.

    Raises:
        YamlFault: The file is not YAML, or is too large.
        ArenoError: The file cannot be opened.
    """
    text = checked_text(beginning_of(path, MOST_BYTES + 1))
    try:
        # OmegaConf turns any exception in its midst into one of its own, and a signal would be lost.
        with interrupts_held():
            return OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else None
    except Exception as error:  # of PyYAML, of OmegaConf, and those that they let through
        raise YamlFault(fault(error)) from error


def checked_text(content: bytes) -> str:
    """Return YAML as text, after the check that all of its values can be made in bounded time and memory.

    Raises:
        YamlFault: The text is not YAML, or too large.
    """
    if len(content) > MOST_BYTES:
        raise YamlFault(f"it has more than {MOST_BYTES} bytes")
    try:
        text = content.decode()
        try:
            _check(text, _FAST_LOADER)
        except yaml.YAMLError:  # that of PyYAML itself says better where and why, and has the last word
            _check(text, yaml.SafeLoader)
    except YamlFault:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlFault(fault(error)) from error
    return text


def fault(error: BaseException) -> str:
    """Return an error of a YAML reader as one line."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"line {mark.line + 1}: {error.problem or error.context}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return f"it is nested too deeply; at most {MOST_LEVELS} levels are read"
    return next((" ".join(line.split()) for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass
class _Part:
    """A part of a file: its anchor, the number of its values, and how many levels of collections it has."""

    anchor: str | None
    values: int = 1
    levels: int = 0


def _check(text: str, loader: Any) -> None:
    """Raise YamlFault if the values, with aliases written out, are too many, too deep or without end."""
    named: dict[str, _Part] = {}
    outer = [_Part(None)]  # the file, and the collections that are open
    total = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            outer.append(_Part(event.anchor))
            part, new = outer[-1], 1
        elif isinstance(event, yaml.CollectionEndEvent):
            part, new = outer.pop(), 0
            part.levels += 1
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event)
            part, new = _Part(event.anchor), 1
        elif isinstance(event, yaml.AliasEvent):
            part = _named_part(event, named, outer)
            new = part.values
        else:
            continue
        total += new
        _check_size(event, total, len(outer) - 1 + part.levels)
        if part is not outer[-1]:  # it is complete
            outer[-1].values += part.values
            outer[-1].levels = max(outer[-1].levels, part.levels)
            if part.anchor is not None:
                named[part.anchor] = part


def _named_part(event: Any, named: Mapping[str, _Part], outer: Sequence[_Part]) -> _Part:
    """Return the part that an alias repeats. Raises YamlFault for an alias of a part that has not ended above it."""
    if event.anchor in named:
        return named[event.anchor]
    within = any(part.anchor == event.anchor for part in outer)
    reason = "refers to a value that contains it" if within else "has no anchor before it"
    raise YamlFault(f"line {event.start_mark.line + 1}: the alias *{event.anchor} {reason}")


def _check_size(event: Any, total: int, levels: int) -> None:
    line = event.start_mark.line + 1
    if total > MOST_VALUES:
        raise YamlFault(f"line {line}: it has more than {MOST_VALUES:,} values (each alias counts as a full copy)")
    if levels > MOST_LEVELS:
        raise YamlFault(f"line {line}: it has more than {MOST_LEVELS} levels of nesting")


def _check_scalar(event: Any) -> None:
    """Raise YamlFault for text that is not whole, or long text in which numbers or interpolations are looked for."""
    size, line = len(event.value), event.start_mark.line + 1
    try:
        event.value.encode()
    except UnicodeEncodeError as error:
        raise YamlFault(f"line {line}: it has half of a surrogate pair, {event.value[error.start]!r}") from error
    if size > _MOST_CHARACTERS and (event.implicit[0] or "${" in event.value):
        text = "a value without quotes, or with ${{...}}, has {} characters; at most {} are read"
        raise YamlFault(f"line {line}: {text.format(size, _MOST_CHARACTERS)}")
