"""Reads the fields of a JSON request one by one, and says what is wrong with which.

The body of a request as a JSON value, whatever its bytes are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from areno.data.row_schema import bad_text
from areno.errors import did_you_mean
from areno.schema.values import show
from areno.server.errors import ApiError, bad, is_deeper

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


MOST_LEVELS = 128
"""Lists and objects in each other. All that reads a request afterwards may recurse."""
_MOST_PARTS = 200_000  # values but numbers that the scanner in C reads: it lets no other thread run meanwhile
_MOST_OBJECTS = 200_000  # lists and objects: Python's garbage collector looks through all of them at once


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its Content-Encoding. Raises ApiError where it is damaged, too large or unknown.

    Args:
        body: As it was sent.
        encoding: The value of the header.
        most: Bytes of the result.
    """
    if encoding not in ("gzip", "deflate"):
        raise ApiError(415, f"Content-Encoding is {encoding[:80]!r}; gzip, deflate or none is expected")
    # Some clients send deflate without the header that the standard asks for.
    is_bare = encoding == "deflate" and body[:1] and body[0] & 15 != zlib.DEFLATED
    unpacking = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32)
    try:
        found = unpacking.decompress(body, most + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not valid {encoding}: {error}") from None
    if len(found) > most:
        raise too_large(most)
    if not unpacking.eof or unpacking.unused_data:
        raise ApiError(400, f"the body is not valid {encoding}: it is truncated or has trailing data")
    return found


def too_large(most: int) -> ApiError:
    """Return the error for a body of more than `most` bytes."""
    return ApiError(413, f"the request has more than {most} bytes", code="request_too_large")


def read_json(body: bytes) -> Any:
    """Return the value of a JSON text. Raises ApiError 400 where it is none or nested too deeply.

    Args:
        body: In UTF-8, or another encoding of Unicode.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        n_parts = text.count('"') // 2 + sum(map(text.count, ("[", "{", "null", "true", "false")))
        decoder: type[json.JSONDecoder] = _Interruptible if n_parts > _MOST_PARTS else json.JSONDecoder
        # Functions in Python let other threads run.
        numbers: dict[str, Any] = {"parse_int": lambda digits: int(digits), "parse_float": lambda text: float(text)}
        value = decoder(**numbers, parse_constant=_refuse).decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if is_deeper(value, MOST_LEVELS):
        raise _too_deep()
    return value


class _Interruptible(json.JSONDecoder):
    """Reads ten times as slowly as the scanner in C, but lets other threads run."""

    def __init__(self, **how: Any):
        super().__init__(**how)
        self._n_objects = 0
        self.parse_array, self.parse_object = self._counted(JSONArray), self._counted(JSONObject)
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_counted(*args: Any) -> Any:
            self._n_objects += 1
            if self._n_objects > _MOST_OBJECTS:
                raise ApiError(400, f"the body has more than {_MOST_OBJECTS:,} lists and objects")
            return parse(*args)

        return parse_counted


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {MOST_LEVELS} levels deep")


def _refuse(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")
