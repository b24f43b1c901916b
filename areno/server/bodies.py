"""The body of a request as a JSON value, whatever its bytes are."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from areno.server.bounds import is_deeper
from areno.server.errors import ApiError

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
