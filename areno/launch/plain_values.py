"""Makes plain values of what Hydra has composed: interpolations are resolved, missing keys are left out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from areno.config.schema.build import Consequence
from areno.errors import ConfigError, Problem
from areno.launch.hydra_text import explain, references

_MOST_VALUES = 30_000


def resolved(node: DictConfig, prefix: str, problems: list[Problem]) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and plain values of a node. Missing values, and interpolations that fail, are left out."""
    for key in node:
        full = f"{prefix}{key}"
        if full == "hydra" or OmegaConf.is_missing(node, key):
            continue
        try:
            value = node[key]
            if isinstance(value, DictConfig):
                value = dict(resolved(value, f"{full}.", problems))
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            kind = Consequence if isinstance(error, InterpolationToMissingValueError) else Problem
            problems.append(kind(full, explain(error)))
            continue
        yield key, value


def check_references(raw: Mapping[Any, Any]) -> None:
    """Raise ConfigError if interpolations that refer to each other expand to more values than can be made.

    raw: the composition with interpolations as they are written.
    """
    known: dict[tuple[str, ...], int] = {}

    def size(path: tuple[str, ...]) -> int:
        """The number of values that are read for the one at `path`."""
        if path not in known:
            known[path] = 1  # for a circle, which OmegaConf finds itself
            value = functools.reduce(_inner, path, raw)
            if isinstance(value, (dict, list)):
                inner = value if isinstance(value, dict) else map(str, range(len(value)))
                known[path] += sum(size((*path, str(name))) for name in inner)
            elif isinstance(value, str):
                known[path] += sum(size(_target(path, key.strip())) for key in references(value))
        return known[path]

    try:
        if size(()) <= _MOST_VALUES:
            return
    except RecursionError:
        pass
    raise ConfigError(f"interpolations (${{...}}) expand to more than {_MOST_VALUES:,} values")


def _target(path: tuple[str, ...], key: str) -> tuple[str, ...]:
    """The path of a key, which is relative to the section around `path` if it begins with dots."""
    names = key.lstrip(".")
    n_dots = len(key) - len(names)
    start = path[: max(0, len(path) - n_dots)] if n_dots else ()
    return (*start, *(name for name in names.replace("[", ".").replace("]", "").split(".") if name))


def _inner(value: Any, name: str) -> Any:
    """The value at a key or a place of a section or a list; None if there is none."""
    if isinstance(value, dict):
        return next((inner for key, inner in value.items() if str(key) == name), None)
    return value[int(name)] if isinstance(value, list) and name.isdecimal() and int(name) < len(value) else None


def delete(data: dict[Any, Any], key: str) -> bool:
    """Remove a dotted key from nested dictionaries. False if it was not there."""
    section, _, inner = key.partition(".")
    if inner:
        return isinstance(data.get(section), dict) and delete(data[section], inner)
    return data.pop(key, delete) is not delete
