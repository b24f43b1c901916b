"""Read YAML files of users and of other machines, after a check that they are small.

A few lines of YAML can stand for billions of values, because each alias repeats a value of the file. The check counts
the values with all aliases expanded, but constructs none of them, so its time is linear in the length of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from areno.files.durable import delay_interrupts
from areno.files.paths import read_first_bytes

MAX_BYTES = 2**20
MAX_VALUES = 10_000
MAX_DEPTH = 32
_MAX_CHARACTERS = 10_000  # limit for a value that may be a number or contain ${...}, which are slow to parse
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the loader in C, if PyYAML has it


class YamlFault(ValueError):
    """Raised for YAML that cannot be read or is too large. The message is one line without the name of the file."""


def load_yaml(path: Path) -> Any:
    """Read a YAML file as dictionaries, lists and scalars. Returns None if it does not exist or is empty.

    Numbers are read as Hydra reads them, so 1e-6 is a float. Interpolations (`${...}`) are not resolved and stay text.
    """
    text = checked_text(read_first_bytes(path, MAX_BYTES + 1))
    try:
        # OmegaConf turns any exception into one of its own, so the interrupt of a signal would be lost.
        with delay_interrupts():
            return OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else None
    except Exception as error:  # PyYAML and OmegaConf raise many unrelated kinds of errors
        raise YamlFault(describe_error(error)) from error


def checked_text(content: bytes) -> str:
    """Decode a YAML file, and check that constructing its values takes bounded time and memory."""
    if len(content) > MAX_BYTES:
        raise YamlFault(f"it has more than {MAX_BYTES} bytes")
    try:
        text = content.decode()
        try:
            _check_events(text, _FAST_LOADER)
        except yaml.YAMLError:  # PyYAML's loader in Python decides, and its errors are clearer
            _check_events(text, yaml.SafeLoader)
    except YamlFault:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlFault(describe_error(error)) from error
    return text


def describe_error(error: BaseException) -> str:
    """Describe an error of a YAML reader in one line, with the line number if it is known."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"line {mark.line + 1}: {error.problem or error.context}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return f"it is nested too deeply; at most {MAX_DEPTH} levels are read"
    return next((" ".join(line.split()) for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass
class _NodeSize:
    """The size of a value with its aliases expanded."""

    anchor: str | None
    values: int = 1
    levels: int = 0  # of nested collections


def _check_events(text: str, loader: Any) -> None:
    """Raise YamlFault if a text has too many values, too deep nesting, or a wrong alias."""
    named: dict[str, _NodeSize] = {}
    outer = [_NodeSize(None)]  # the file, and the collections that are open
    total = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            outer.append(_NodeSize(event.anchor))
            part, new = outer[-1], 1
        elif isinstance(event, yaml.CollectionEndEvent):
            part, new = outer.pop(), 0
            part.levels += 1
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event)
            part, new = _NodeSize(event.anchor), 1
        elif isinstance(event, yaml.AliasEvent):
            part = _aliased_size(event, named, outer)
            new = part.values
        else:
            continue
        total += new
        _check_size(event, total, len(outer) - 1 + part.levels)
        if part is not outer[-1]:  # the part is complete
            outer[-1].values += part.values
            outer[-1].levels = max(outer[-1].levels, part.levels)
            if part.anchor is not None:
                named[part.anchor] = part


def _aliased_size(event: Any, named: Mapping[str, _NodeSize], outer: Sequence[_NodeSize]) -> _NodeSize:
    """Return the size of the value that an alias repeats. The value must be complete, so not in `outer`."""
    if event.anchor in named:
        return named[event.anchor]
    within = any(part.anchor == event.anchor for part in outer)
    reason = "refers to a value that contains it" if within else "has no anchor before it"
    raise YamlFault(f"line {event.start_mark.line + 1}: the alias *{event.anchor} {reason}")


def _check_size(event: Any, total: int, levels: int) -> None:
    line = event.start_mark.line + 1
    if total > MAX_VALUES:
        raise YamlFault(f"line {line}: it has more than {MAX_VALUES:,} values (each alias counts as a full copy)")
    if levels > MAX_DEPTH:
        raise YamlFault(f"line {line}: it has more than {MAX_DEPTH} levels of nesting")


def _check_scalar(event: Any) -> None:
    """Raise YamlFault if a scalar is not valid Unicode, or is too long to be parsed as a number or ${...}."""
    size, line = len(event.value), event.start_mark.line + 1
    try:
        event.value.encode()
    except UnicodeEncodeError as error:
        raise YamlFault(f"line {line}: it has half of a surrogate pair, {event.value[error.start]!r}") from error
    if size > _MAX_CHARACTERS and (event.implicit[0] or "${" in event.value):
        text = "a value without quotes, or with ${{...}}, has {} characters; at most {} are read"
        raise YamlFault(f"line {line}: {text.format(size, _MAX_CHARACTERS)}")
