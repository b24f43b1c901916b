"""A JSON file of a model folder with typed look-ups. What is wrong with it is gathered, so that all of it is told."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar, cast

from areno.errors import CheckpointError, Problem

T = TypeVar("T")
MOST = 2**31 - 1  # of every int: no size of a model comes near, and kernels count so far


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in the file. CheckpointError where it cannot be read or is something else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, expected a JSON object")
    return values


class RawConfig:
    """The fields of a file, or of a section in it. Every problem names the file and the field.

    A look-up that fails adds to `problems` and returns something of the right type, so that reading goes on.
    """

    def __init__(self, values: dict[str, Any], origin: str, problems: list[Problem] | None = None):
        self.values, self.origin = values, origin
        self.problems: list[Problem] = [] if problems is None else problems
        self._read: set[str] = set()

    def section(self, name: str) -> RawConfig:
        """The object in a field; without fields where it is absent or null."""
        return RawConfig(self.get(name, dict, {}), f"{self.origin}: {name}", self.problems)

    def get(
        self,
        name: str,
        kind: type[T],
        default: T | None = None,
        *,
        ge: float | None = None,
        gt: float | None = None,
        le: float | None = None,
    ) -> T:
        """The field, or `default` where it is absent or null. Without a default the field is required.

        ge, gt, le: bounds of a number: at least, more than, at most. An int is at most MOST, a float is finite.
        """
        self._read.add(name)
        value: Any = self.values.get(name)
        if value is None and default is not None:
            return default
        if kind is int and le is None:
            le = MOST
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < 1e300 else math.inf
        if _holds(value, kind, ge, gt, le):
            return cast(T, value)
        bounds = [("at least", ge), ("more than", gt), ("at most", le)]
        expected = ", ".join([kind.__name__, *(f"{words} {bound}" for words, bound in bounds if bound is not None)])
        found = "missing" if value is None else reprlib.repr(value)
        self.wrong(f"{name} is {found}, expected {expected}")
        if default is not None:
            return default
        return cast(T, kind(1) if kind in (int, float) else kind())  # type: ignore[call-arg]

    def wrong(self, what: str) -> None:
        """Add a problem."""
        self.problems.append(Problem("", f"{self.origin}: {what}"))

    def refuse(self, name: str, supported: str, found: object = None) -> None:
        """Add the problem of a field whose value this code would compute wrongly. found: what to show of the value."""
        shown = reprlib.repr(self.values.get(name) if found is None else found)
        self.wrong(f"{name} is {shown}, which is not supported; expected {supported}")

    def refuse_unknown(self, harmless: Collection[str], where: str = "") -> None:
        """Add a problem for each field that nothing has looked up, unless it is harmless or says nothing.

        Names that start with an underscore are a library's own notes. where: for the message.
        """
        for name, value in self.values.items():
            if name in self._read or name in harmless or name.startswith("_") or not value:
                continue
            advice = "remove it if the model computes the same without it"
            name = name if name.isidentifier() and len(name) < 60 else reprlib.repr(name)
            self.wrong(f"{name} is {reprlib.repr(value)}, a field that areno does not know{where}; {advice}")

    def error(self) -> CheckpointError:
        """All problems in one error, each told once."""
        return CheckpointError(dict.fromkeys(self.problems))


def _holds(value: Any, kind: type, ge: float | None, gt: float | None, le: float | None) -> bool:
    """Whether the value has the type, a bool being no int, and is finite and within the bounds if it is a number."""
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        return False
    if kind not in (int, float):
        return True
    is_within = (ge is None or value >= ge) and (gt is None or value > gt) and (le is None or value <= le)
    return is_within and (kind is int or math.isfinite(value))
