"""Errors as OpenAI's clients expect them: an HTTP status, and a JSON body that says what was wrong with which field."""

from __future__ import annotations

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
