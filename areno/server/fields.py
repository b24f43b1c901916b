"""Reads the fields of a JSON request one by one, and says what is wrong with which."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from areno.config.schema.values import show
from areno.data.row_schema import bad_text
from areno.errors import did_you_mean
from areno.server.errors import ApiError, bad

_LONG_NAME = 80  # characters: no misspelling of a field


class Fields:
    """The fields of one JSON object. Null counts as absent. What nobody took is an error at the end.

    ignored: fields without an effect here, such as those for the accounting of a hosted service.
    """

    def __init__(self, values: Any, where: str = ""):
        if not isinstance(values, Mapping):
            raise bad(where or None, f"is {show(values)}; a JSON object is expected")
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = f"{where}." if where else ""
        self._taken: set[str] = set()

    def name(self, field: str) -> str:
        """The field as an error names it."""
        return self._where + field

    def __contains__(self, field: str) -> bool:
        return field in self._values

    def take(self, field: str) -> Any:
        """The value, of whatever kind; None where it is absent."""
        self._taken.add(field)
        return self._values.get(field)

    def number(self, field: str, least: float, most: float) -> float | None:
        """A number within bounds."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise bad(self.name(field), f"is {show(value)}; a number from {least:g} to {most:g} is expected")
        return float(value)

    def integer(self, field: str, least: int, most: int) -> int | None:
        """A whole number within bounds."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise bad(self.name(field), f"is {show(value)}; a whole number from {least} to {most} is expected")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise bad(self.name(field), f"is {show(value)}; true or false is expected")
        return default if value is None else value

    def text(self, field: str) -> str | None:
        """A string of whole characters."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise bad(self.name(field), f"is {show(value)}; a string is expected")
        if problem := bad_text(value):
            raise bad(self.name(field), problem)
        return value

    def choice(self, field: str, choices: Collection[str]) -> str | None:
        """One of some words."""
        value = self.text(field)
        if value is not None and value not in choices:
            raise bad(self.name(field), f"is {show(value)}; expected one of {', '.join(choices)}")
        return value

    def items(self, field: str, most: int) -> list[Any] | None:
        """A list of at most so many elements."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise bad(self.name(field), f"is {show(value)}; a list is expected")
        if len(value) > most:
            raise bad(self.name(field), f"has {len(value)} elements; at most {most} are taken")
        return value

    def finish(self, ignored: Collection[str] = (), unsupported: Collection[str] = ()) -> None:
        """Raise for fields that were not taken. Those of `ignored` have no effect, which does no harm."""
        for field in self._values.keys() - self._taken - set(ignored):
            if field in unsupported:
                raise bad(self.name(field), "is not supported by this server")
            similar = did_you_mean(field, self._taken | set(ignored)) if len(field) < _LONG_NAME else ""
            message = f"Unrecognized request argument supplied: {self.name(field)}{similar}"
            raise ApiError(400, message, param=self.name(field))
