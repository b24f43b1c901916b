"""Errors as OpenAI's clients expect them: an HTTP status, and a JSON body that says what was wrong with which field.

Bounds of what clients send: the depth and the size of JSON values, and the number of tokens of a text.

Each check stops as soon as its bound is passed, so its own work is bounded, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTEXT_FULL = "context_length_exceeded"
"""The code of a request whose prompt leaves no room for an answer."""

_MOST_MESSAGE, _MOST_PARAM = 2000, 200  # characters

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class BadTrajectory(Exception):
    """What an agent returned cannot be trained on. The text says why."""


class ApiError(Exception):
    """A request that is answered with an error. param: the field that it is about. code: a word for programs.

    The message may repeat anything that the request says: it becomes one line of bounded length.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        message = _cut(" ".join(message[: 2 * _MOST_MESSAGE].split()), _MOST_MESSAGE)
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = param if param is None else _cut(param, _MOST_PARAM)

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field that is not as expected: status 400."""
    return ApiError(400, message if param is None else f"{param} {message}", param=param, code=code)


_PIECE = 1 << 16  # characters that become tokens at once
_AT_CUTS = 8  # counting in pieces may overestimate, by less than 1/8


def is_deeper(value: Any, most: int) -> bool:
    """Return whether JSON objects and lists are nested in `value` more than `most` levels deep."""
    level = [value]
    for _ in range(most + 1):
        level = [one for one in level if isinstance(one, Mapping | list)]
        if not level:
            return False
        level = [child for one in level for child in _children(one)]
    return True


def is_larger(value: Any, most: int) -> bool:
    """Return whether a JSON value is larger than `most`. Each value in it counts as one, and each character, too."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        most -= 1 + (len(one) if isinstance(one, str) else 0)
        if isinstance(one, Mapping | list):
            if len(one) > most:
                return True
            if isinstance(one, Mapping):
                waiting += one
            waiting += _children(one)
        if most < 0:
            return True
    return False


def has_more_tokens(tokenizer: Any, text: str, most: int) -> bool:
    """Return whether a text surely has more than `most` tokens.

    Tokens are counted in pieces of the text, so a text of many megabytes is judged by its beginning. A text slightly
    above the bound may pass.

    Args:
        tokenizer: Of transformers.
        text: Any text.
        most: In tokens.
    """
    if len(text) <= most:
        return False
    n = 0
    for start in range(0, len(text), _PIECE):
        n += _tokens_of(tokenizer, text[start : start + _PIECE])
        if n - n // _AT_CUTS > most:
            return True
    return False


def _tokens_of(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _children(value: Mapping[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value
