"""The errors of the server, and the bounds on what clients send.

`ApiError` is an HTTP status with OpenAI's JSON body, and `bad_field` builds the error for a wrong field. The checks
bound the depth and size of JSON values and the number of tokens in a prompt. Each check stops as soon as its bound is
exceeded, so its own work is bounded too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CONTEXT_FULL = "context_length_exceeded"
"""Error code for a prompt that leaves no room for an answer."""

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
    """An error response to a request.

    The message may repeat text of the request, so it is cut to one line of at most 2,000 characters.

    Args:
        status: HTTP status.
        message: Description of the error for people.
        param: Name of the wrong field in the request. None if the error is not about one field.
        code: Error code for programs, such as "context_length_exceeded", or None.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        message = _cut(" ".join(message[: 2 * _MAX_MESSAGE].split()), _MAX_MESSAGE)
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = param if param is None else _cut(param, _MAX_PARAM)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object, `{"error": {message, type, param, code}}`."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _cut(text: str, max_len: int) -> str:
    """Cut a text to `max_len` characters."""
    return text if len(text) <= max_len else f"{text[: max_len - 3]}..."


class PromptTooLong(ApiError):
    """A prompt with too many tokens for the model's context. The HTTP status is 400.

    Args:
        max_tokens: Maximum number of tokens in a prompt.
    """

    def __init__(self, max_tokens: int):
        message = f"the prompt has more than {max_tokens} tokens, which leaves no room for a completion"
        super().__init__(400, f"{message}; shorten the prompt", param="prompt", code=CONTEXT_FULL)


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return the error for a field with a wrong value.

    Args:
        param: Name of the field. The message begins with this name. None is for the whole body.
        message: The words after the name, such as "is missing; a string is expected".
        code: Error code for programs, or None.

    Returns:
        An error of status 400.
    """
    return ApiError(400, message if param is None else f"{param} {message}", param=param, code=code)


PIECE = 1 << 16  # characters that are encoded at once
_OVERCOUNT = 8  # counting in pieces may overestimate, by less than 1/8


def is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether JSON objects and lists are nested more than `max_depth` levels deep.

    Args:
        value: A JSON value.
        max_depth: Number of levels.
    """
    level = [value]
    for _ in range(max_depth + 1):
        level = [one for one in level if isinstance(one, Mapping | list)]
        if not level:
            return False
        level = [child for one in level for child in _children(one)]
    return True


def is_larger(value: Any, max_size: int) -> bool:
    """Return whether the size of a JSON value exceeds `max_size`.

    Args:
        value: A JSON value.
        max_size: Bound on the number of values (nested values included) plus the number of characters in all
            strings.
    """
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
    """Raise PromptTooLong if a prompt has more than the maximum number of tokens.

    A huge text is not encoded as a whole, because `has_more_tokens` rejects it first.

    Args:
        tokenizer: Tokenizer of transformers.
        prompt: Text or token ids.
        max_tokens: Maximum number of tokens in the prompt.
        n_before: Number of tokens before `prompt`, which count toward the maximum.

    Raises:
        PromptTooLong: If `n_before` plus the tokens of `prompt` exceed `max_tokens`.
    """
    room = max(max_tokens - n_before, 0)
    is_longer = has_more_tokens(tokenizer, prompt, room) if isinstance(prompt, str) else len(prompt) > room
    if is_longer:
        raise PromptTooLong(max_tokens)


def has_more_tokens(tokenizer: Any, text: str, max_tokens: int) -> bool:
    """Return whether a text certainly has more than `max_tokens` tokens.

    The text is encoded in pieces until the pieces have too many tokens, so only the beginning of a huge text is
    encoded. Cutting a text into pieces can add tokens, so 1/8 of the count is subtracted. The result is therefore False
    for a text with slightly more than `max_tokens` tokens.

    Args:
        tokenizer: Tokenizer of transformers.
        text: Any text.
        max_tokens: Number of tokens.
    """
    if len(text) <= max_tokens:
        return False
    n = 0
    for start in range(0, len(text), PIECE):
        n += _tokens_of(tokenizer, text[start : start + PIECE])
        if n - n // _OVERCOUNT > max_tokens:
            return True
    return False


def _tokens_of(tokenizer: Any, text: str) -> int:
    """Return the number of tokens in a text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _children(value: Mapping[str, Any] | list[Any]) -> list[Any]:
    """Return the values of a JSON object, or the list itself."""
    return list(value.values()) if isinstance(value, Mapping) else value
