"""Makes plain values of what Hydra has composed: interpolations are resolved, missing keys are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from areno.config.schema.build import Consequence
from areno.errors import Problem
from areno.launch.hydra_text import explain


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


def delete(data: dict[Any, Any], key: str) -> bool:
    """Remove a dotted key from nested dictionaries. False if it was not there."""
    section, _, inner = key.partition(".")
    if inner:
        return isinstance(data.get(section), dict) and delete(data[section], inner)
    return data.pop(key, delete) is not delete
