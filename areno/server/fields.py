"""Reading of JSON request bodies and their fields.

`decompress` and `read_json` turn the bytes of a body into a JSON value, within bounds on size and depth. `Fields` reads
the fields of one JSON object, checks each value and rejects fields that were never read.
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
from areno.server.errors import ApiError, bad_field, is_deeper

_LONG_NAME = 80  # characters: a longer name gets no "did you mean"


class Fields:
    """Reader of one JSON object, which checks each field when it is read. A null field counts as absent.

    Call `finish` after the last field to reject fields that were not read.

    Args:
        values: The JSON object.
        where: Path of the object in the request, such as "messages[0]", for error messages.

    Raises:
        ApiError: With status 400 if `values` is not an object.
    """

    def __init__(self, values: Any, where: str = ""):
        if not isinstance(values, Mapping):
            raise bad_field(where or None, f"is {show(values)}; a JSON object is expected")
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = f"{where}." if where else ""
        self._taken: set[str] = set()

    def name(self, field: str) -> str:
        """Return the path of a field in the request, such as "messages[0].role", for error messages.

        Args:
            field: Name of the field.
        """
        return self._where + field

    def __contains__(self, field: str) -> bool:
        return field in self._values

    def take(self, field: str, default: Any = None) -> Any:
        """Return the unchecked value of a field, or `default` if it is absent."""
        self._taken.add(field)
        return self._values.get(field, default)

    def number(self, field: str, minimum: float, maximum: float) -> float | None:
        """Return a number from `minimum` to `maximum`, or None if the field is absent.

        Args:
            field: Name of the field.
            minimum: Smallest allowed value.
            maximum: Largest allowed value.

        Raises:
            ApiError: With status 400 if the field is not such a number.
        """
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise bad_field(self.name(field), f"is {show(value)}; a number from {minimum:g} to {maximum:g} is expected")
        return float(value)

    def integer(self, field: str, minimum: int, maximum: int) -> int | None:
        """Return a whole number from `minimum` to `maximum`, or None if the field is absent.

        Args:
            field: Name of the field.
            minimum: Smallest allowed value.
            maximum: Largest allowed value.

        Raises:
            ApiError: With status 400 if the field is not such a number.
        """
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise bad_field(
                self.name(field), f"is {show(value)}; a whole number from {minimum} to {maximum} is expected"
            )
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a boolean field, or `default` if the field is absent.

        Args:
            field: Name of the field.
            default: Value if the field is absent.

        Raises:
            ApiError: With status 400 if the field is not a boolean.
        """
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise bad_field(self.name(field), f"is {show(value)}; true or false is expected")
        return default if value is None else value

    def text(self, field: str) -> str | None:
        """Return a string field, or None if the field is absent.

        Args:
            field: Name of the field.

        Raises:
            ApiError: With status 400 if the field is not a string or cannot be encoded as UTF-8.
        """
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise bad_field(self.name(field), f"is {show(value)}; a string is expected")
        if problem := bad_text(value):
            raise bad_field(self.name(field), problem)
        return value

    def choice(self, field: str, choices: Collection[str]) -> str | None:
        """Return a field that must be among `choices`, or None if the field is absent.

        Args:
            field: Name of the field.
            choices: The allowed strings.

        Raises:
            ApiError: With status 400 if the field is not among the choices.
        """
        value = self.text(field)
        if value is not None and value not in choices:
            raise bad_field(self.name(field), f"is {show(value)}; expected one of {', '.join(choices)}")
        return value

    def items(self, field: str, max_items: int) -> list[Any] | None:
        """Return a list of at most `max_items` elements, or None if the field is absent.

        Args:
            field: Name of the field.
            max_items: Maximum length of the list. The elements are not checked.

        Raises:
            ApiError: With status 400 if the field is not a list or is too long.
        """
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise bad_field(self.name(field), f"is {show(value)}; a list is expected")
        if len(value) > max_items:
            raise bad_field(self.name(field), f"has {len(value)} elements; at most {max_items} are allowed")
        return value

    def finish(self, ignored: Collection[str] = (), unsupported: Collection[str] = ()) -> None:
        """Reject fields that were not read.

        Args:
            ignored: Fields that are accepted without an effect, such as those for the accounting of a hosted service.
            unsupported: Fields of OpenAI's API that this server does not support. Their error says so.

        Raises:
            ApiError: With status 400 for a field that was not read and is not ignored.
        """
        for field in self._values.keys() - self._taken - set(ignored):
            if field in unsupported:
                raise bad_field(self.name(field), "is not supported by this server")
            similar = did_you_mean(field, self._taken | set(ignored)) if len(field) < _LONG_NAME else ""
            message = f"Unrecognized request argument supplied: {self.name(field)}{similar}"
            raise ApiError(400, message, param=self.name(field))


MAX_DEPTH = 128
"""Maximum nesting of lists and objects in a request, so that recursive functions can read the request."""
MAX_PARTS = 200_000  # values other than numbers for the scanner in C, during which no other thread can run
MAX_OBJECTS = 200_000  # lists and objects, all of which Python's garbage collector scans at once


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body according to its Content-Encoding.

    Args:
        body: The bytes that were sent.
        encoding: Value of the header Content-Encoding in lower case. "gzip" and "deflate" are supported.
        max_bytes: Maximum size of the result, in bytes.

    Returns:
        The decompressed body.

    Raises:
        ApiError: With status 415 for another encoding, 400 for damaged data, 413 for a result that is too large.
    """
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
        raise too_large(max_bytes)
    if not stream.eof or stream.unused_data:
        raise ApiError(400, f"the body is not valid {encoding}: it is truncated or has trailing data")
    return found


def too_large(max_bytes: int) -> ApiError:
    """Return the error of status 413 for a body of more than `max_bytes` bytes.

    Args:
        max_bytes: Limit of the server, in bytes.
    """
    return ApiError(413, f"the request has more than {max_bytes} bytes", code="request_too_large")


def read_json(body: bytes) -> Any:
    """Parse the JSON text of a body.

    Args:
        body: Text in UTF-8, UTF-16 or UTF-32.

    Returns:
        The JSON value.

    Raises:
        ApiError: With status 400 if the body is not JSON, is nested too deeply or has too many lists and objects.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        n_parts = text.count('"') // 2 + sum(map(text.count, ("[", "{", "null", "true", "false")))
        decoder: type[json.JSONDecoder] = _Interruptible if n_parts > MAX_PARTS else json.JSONDecoder
        # With parse functions in Python, other threads can run between two numbers.
        numbers: dict[str, Any] = {"parse_int": lambda digits: int(digits), "parse_float": lambda text: float(text)}
        value = decoder(**numbers, parse_constant=_refuse).decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


class _Interruptible(json.JSONDecoder):
    """A JSON decoder written in Python.

    It is ten times as slow as Python's decoder in C, but other threads can run while it decodes.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._n_objects = 0
        self.parse_array, self.parse_object = self._counted(JSONArray), self._counted(JSONObject)
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same as `parse`, and counts its calls.

        `parse` parses one JSON list or object. The returned function raises ApiError after MAX_OBJECTS lists and
        objects.
        """

        def parse_counted(*args: Any) -> Any:
            self._n_objects += 1
            if self._n_objects > MAX_OBJECTS:
                raise ApiError(400, f"the body has more than {MAX_OBJECTS:,} lists and objects")
            return parse(*args)

        return parse_counted


def _too_deep() -> ApiError:
    """Return the error for a body that is nested too deeply."""
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")


def _refuse(name: str) -> Any:
    """Raise ValueError for a constant that JSON lacks, such as NaN or Infinity."""
    raise ValueError(f"JSON has no {name}")
