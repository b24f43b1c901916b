"""Reading of JSON request bodies, with limits on size and depth, and of their fields."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from areno.data.row_schema import json_value_problem
from areno.errors import did_you_mean
from areno.schema.values import format_value
from areno.server.errors import ApiError, exceeds_depth, invalid_field_error

_LONG_NAME = 80  # characters: a longer name gets no "did you mean"


class RequestFields:
    """One JSON object of a request. Each field is checked when it is read, and a null field counts as absent.

    `where` is the path of the object, such as "messages[0]". Getters return None for an absent field, and raise
    ApiError 400 for a wrong one. Call `reject_unread` after the last field.
    """

    def __init__(self, values: Any, where: str = ""):
        if not isinstance(values, Mapping):
            raise invalid_field_error(where or None, f"is {format_value(values)}; a JSON object is expected")
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = f"{where}." if where else ""
        self._taken: set[str] = set()

    def path(self, field: str) -> str:
        """Return the path of a field, such as "messages[0].role"."""
        return self._where + field

    def __contains__(self, field: str) -> bool:
        return field in self._values

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field without checking it."""
        self._taken.add(field)
        return self._values.get(field, default)

    def _checked(
        self, field: str, kind: Any, expected: str, is_valid: Callable[[Any], bool] = lambda value: True
    ) -> Any:
        """Return a field, or None if it is absent. Raise an error that says what is `expected` of another value."""
        value = self.get(field)
        is_right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool) and is_valid(value)
        if value is not None and not is_right:
            raise invalid_field_error(self.path(field), f"is {format_value(value)}; {expected}")
        return value

    def number(self, field: str, minimum: float, maximum: float) -> float | None:
        expected = f"a number from {minimum:g} to {maximum:g} is expected"
        value = self._checked(field, int | float, expected, lambda value: minimum <= value <= maximum)
        return None if value is None else float(value)

    def integer(self, field: str, minimum: int, maximum: int) -> int | None:
        expected = f"a whole number from {minimum} to {maximum} is expected"
        return self._checked(field, int, expected, lambda value: minimum <= value <= maximum)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._checked(field, bool, "true or false is expected")
        return default if value is None else value

    def text(self, field: str) -> str | None:
        value = self._checked(field, str, "a string is expected")
        if value is not None and (problem := json_value_problem(value)):
            raise invalid_field_error(self.path(field), problem)
        return value

    def choice(self, field: str, choices: Collection[str]) -> str | None:
        self.text(field)
        return self._checked(field, str, f"expected one of {', '.join(choices)}", lambda value: value in choices)

    def array(self, field: str, max_items: int) -> list[Any] | None:
        """Return a list whose elements are not checked."""
        value = self._checked(field, list, "a list is expected")
        if value is not None and len(value) > max_items:
            raise invalid_field_error(self.path(field), f"has {len(value)} elements; at most {max_items} are allowed")
        return value

    def unread(self) -> set[str]:
        return self._values.keys() - self._taken

    def reject_unread(self, ignored: Collection[str] = (), unsupported: Collection[str] = ()) -> None:
        """Reject fields that were not read. `unsupported` fields are part of OpenAI's API, and their error says so."""
        for field in self.unread() - set(ignored):
            if field in unsupported:
                raise invalid_field_error(self.path(field), "is not supported by this server")
            similar = did_you_mean(field, self._taken | set(ignored)) if len(field) < _LONG_NAME else ""
            message = f"Unrecognized request argument supplied: {self.path(field)}{similar}"
            raise ApiError(400, message, param=self.path(field))


MAX_DEPTH = 128  # of nested lists and objects in a request, so that recursive functions can read it
MAX_PARTS = 200_000  # values other than numbers for the scanner in C, during which no other thread can run
MAX_OBJECTS = 200_000  # lists and objects, all of which Python's garbage collector scans at once


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body. Raises ApiError 415 for an unknown encoding, 400 for damaged data, 413 for too much data."""
    if encoding not in ("gzip", "deflate"):
        raise ApiError(415, f"Content-Encoding is {encoding[:80]!r}; gzip, deflate or none is expected")
    # Some clients send deflate without the zlib header that the standard requires.
    is_bare = encoding == "deflate" and body[:1] and body[0] & 15 != zlib.DEFLATED
    stream = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32)
    try:
        found = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not valid {encoding}: {error}") from None
    if len(found) > max_bytes:
        raise too_large_error(max_bytes)
    if not stream.eof or stream.unused_data:
        raise ApiError(400, f"the body is not valid {encoding}: it is truncated or has trailing data")
    return found


def too_large_error(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request has more than {max_bytes} bytes", code="request_too_large")


def read_json(body: bytes) -> Any:
    """Parse a body in UTF-8, UTF-16 or UTF-32. Raises ApiError 400 for invalid JSON and exceeded limits."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        n_parts = text.count('"') // 2 + sum(map(text.count, ("[", "{", "null", "true", "false")))
        decoder: type[json.JSONDecoder] = _InterruptibleDecoder if n_parts > MAX_PARTS else json.JSONDecoder
        # With parse functions in Python, other threads can run between two numbers.
        numbers: dict[str, Any] = {"parse_int": lambda digits: int(digits), "parse_float": lambda text: float(text)}
        value = decoder(**numbers, parse_constant=_reject_constant).decode(text)
    except RecursionError:
        raise _too_deep_error() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if exceeds_depth(value, MAX_DEPTH):
        raise _too_deep_error()
    return value


class _InterruptibleDecoder(json.JSONDecoder):
    """A JSON decoder in Python. It is ten times as slow as the one in C, but lets other threads run."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._n_objects = 0
        self.parse_array, self.parse_object = self._with_object_limit(JSONArray), self._with_object_limit(JSONObject)
        self.scan_once = py_make_scanner(self)

    def _with_object_limit(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the parser of one list or object, so that it raises ApiError after MAX_OBJECTS calls."""

        def parse_counted(*args: Any) -> Any:
            self._n_objects += 1
            if self._n_objects > MAX_OBJECTS:
                raise ApiError(400, f"the body has more than {MAX_OBJECTS:,} lists and objects")
            return parse(*args)

        return parse_counted


def _too_deep_error() -> ApiError:
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")


def _reject_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")
