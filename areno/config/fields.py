"""A configuration field: a dataclass field with help text, bounds and the flag of `areno train` it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from areno.errors import ConfigError, Problem

_MISSING = dataclasses.MISSING


def knob(
    default: Any = _MISSING,
    *,
    help: str,
    factory: Any = _MISSING,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    flag: str | None = None,
) -> Any:
    """Declare one setting. Without `default` and `factory` it is required.

    ge, gt, le, lt bound a number (None values are not compared). Choices come from a `Literal` type.
    """
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt, "flag": flag}
    kwargs: dict[str, Any] = {"metadata": metadata, "kw_only": True}
    if default is not _MISSING:
        kwargs["default"] = default
    if factory is not _MISSING:
        kwargs["default_factory"] = factory
    return dataclasses.field(**kwargs)


class Section:
    """Base of every configuration dataclass: values are checked when it is built, whoever builds it."""

    def __post_init__(self) -> None:
        found = list(self.problems())
        if found:
            raise ConfigError(found)

    def problems(self) -> Iterator[Problem]:
        """Cross-field checks; keys are relative to this section."""
        return iter(())
