"""Errors of the server, and bounds on what clients send.

Each check stops as soon as its bound is exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CONTEXT_FULL = "context_length_exceeded"  # code of a prompt that leaves no room for an answer
REQUESTS_SPENT, TOKENS_SPENT = (
    "too_many_requests",
    "token_budget_exceeded",
)  # codes of requests beyond a sample's budget

_MAX_MESSAGE, _MAX_PARAM = 2000, 200  # characters

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class BadTrajectory(Exception):
    """An agent's trajectory that cannot be trained on. The message says why."""


class ApiError(Exception):
    """An error response. `param` names the wrong field. `code` names the kind of error, for programs.

    The message may repeat text of the request, so it is cut to one line of at most 2,000 characters.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        message = _shorten(" ".join(message[: 2 * _MAX_MESSAGE].split()), _MAX_MESSAGE)
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = param if param is None else _shorten(param, _MAX_PARAM)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _shorten(text: str, max_len: int) -> str:
    return text if len(text) <= max_len else f"{text[: max_len - 3]}..."


class PromptTooLong(ApiError):
    def __init__(self, max_tokens: int):
        message = f"the prompt has more than {max_tokens} tokens, which leaves no room for a completion"
        super().__init__(400, f"{message}; shorten the prompt", param="prompt", code=CONTEXT_FULL)


def invalid_field_error(param: str | None, message: str) -> ApiError:
    """Return an error with status 400 about the field `param`, or about the whole body if `param` is None."""
    return ApiError(400, message if param is None else f"{param} {message}", param=param)


PIECE = 1 << 16  # characters that are encoded at once
_OVERCOUNT = 8  # counting in pieces may overestimate, by less than 1/8


def exceeds_depth(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth + 1):
        level = [one for one in level if isinstance(one, Mapping | list)]
        if not level:
            return False
        level = [child for one in level for child in _children(one)]
    return True


def exceeds_size(value: Any, max_size: int) -> bool:
    """Return whether the number of nested values plus the number of characters in all strings exceeds `max_size`."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        max_size -= 1 + (len(one) if isinstance(one, str) else 0)
        if isinstance(one, Mapping | list):
            if len(one) > max_size:
                return True
            if isinstance(one, Mapping):
                waiting += one
            waiting += _children(one)
        if max_size < 0:
            return True
    return False


def check_prompt_length(tokenizer: Any, prompt: str | Sequence[int], max_tokens: int, n_before: int = 0) -> None:
    room = max(max_tokens - n_before, 0)
    is_longer = has_more_tokens(tokenizer, prompt, room) if isinstance(prompt, str) else len(prompt) > room
    if is_longer:
        raise PromptTooLong(max_tokens)


def has_more_tokens(tokenizer: Any, text: str, max_tokens: int) -> bool:
    """Return whether a text certainly has more than `max_tokens` tokens. Only the beginning of a huge text is encoded.

    Cutting a text into pieces can add tokens, so 1/8 of the count is subtracted. The result is therefore False for a
    text with slightly more than `max_tokens` tokens.
    """
    if len(text) <= max_tokens:
        return False
    n = 0
    for start in range(0, len(text), PIECE):
        n += _count_tokens(tokenizer, text[start : start + PIECE])
        if n - n // _OVERCOUNT > max_tokens:
            return True
    return False


def _count_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _children(value: Mapping[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value
