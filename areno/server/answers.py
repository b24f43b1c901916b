"""The parts that answers of both endpoints are made of: log-probabilities, usage, the extra field of tokens."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from areno.server.text import Spelled, TokenTexts
from areno.types import GenerationOutput, TokenScores

TokenScore = tuple[int, float | None, TokenScores]
"""A token, its log-probability (None for the first of a prompt), and the most likely tokens in its place."""

SpelledScore = tuple[TokenScore, Spelled]


def scores_of(output: GenerationOutput) -> list[TokenScore]:
    """Of the completion's tokens."""
    top = output.top_logprobs or [[]] * len(output.tokens)
    return list(zip(output.tokens, output.logprobs, top, strict=True))


def envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every answer begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(n_prompt: int, n_completion: int, n_cached: int) -> dict[str, Any]:
    """Tokens of the request and of all of its choices."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def finish_reason(output: GenerationOutput) -> str:
    """As the API names it. An answer whose grammar became too complex is cut off, like one without room for more."""
    return "stop" if output.finish_reason == "stop" else "length"


def chat_logprobs(texts: TokenTexts, scores: Iterable[SpelledScore]) -> dict[str, Any]:
    """Return `logprobs` of a chat choice."""

    def named(text: str, data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}

    content = []
    for (token, logprob, top), spelled in scores:
        own = spelled.text, spelled.data
        others = [named(*(own if one == token else texts.of(one, spelled.is_first)), value) for one, value in top]
        content.append({**named(*own, logprob or 0.0), "top_logprobs": others})
    return {"content": content, "refusal": None}


def text_logprobs(texts: TokenTexts, scores: Sequence[SpelledScore], n_top: int, offset: int = 0) -> dict[str, Any]:
    """Return `logprobs` of a choice of /v1/completions.

    Args:
        texts: Names of the most likely tokens. Each has its own, as they are keys of an object.
        scores: The tokens.
        n_top: How many of the most likely tokens were asked for.
        offset: Characters of the choice's text before the first token.
    """
    offsets, tops = list[int](), list[dict[str, float] | None]()
    for (token, logprob, top), spelled in scores:
        offsets.append(offset)
        offset += len(spelled.text)
        if logprob is None:
            tops.append(None)
            continue
        found = {spelled.text: logprob}
        for one, value in top:
            if one != token:
                found[texts.key(one, spelled.is_first, found)] = value
        tops.append(found)
    return {
        "tokens": [spelled.text for _, spelled in scores],
        "token_logprobs": [logprob for (_, logprob, _), _ in scores],
        "top_logprobs": tops if n_top else None,
        "text_offset": offsets,
    }


def token_field(prompt: dict[str, Any], outputs: Iterable[GenerationOutput]) -> dict[str, Any]:
    """The extra field `areno`: the tokens themselves. prompt: what is told of the prompt."""
    choices = [
        {
            "index": index,
            "token_ids": output.tokens,
            "logprobs": output.logprobs,
            "versions": output.versions,
            "finish_reason": output.finish_reason,
        }
        for index, output in enumerate(outputs)
    ]
    return {**prompt, "choices": choices}


class WrittenTokens:
    """What `token_field` tells of one choice, as JSON that is written while the choice is sampled."""

    _LISTS = (("token_ids", "tokens"), ("logprobs", "logprobs"), ("versions", "versions"))

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {name: [] for name, _ in self._LISTS}
        self._n_written = 0

    def add(self, output: GenerationOutput) -> None:
        """An output of the engine: of the last one, which has the whole completion, what is not written yet."""
        start = 0 if output.finish_reason is None else self._n_written
        numbers: list[Any] = []
        for name, field in self._LISTS:
            if numbers := tail(output, field, start):
                self._pieces[name].append(to_json(numbers)[1:-1])
        self._n_written += len(numbers)

    def text(self, index: int, reason: str | None) -> bytes:
        """The object of the choice."""
        lists = b"".join(b'"%b":[%b],' % (name.encode(), b",".join(parts)) for name, parts in self._pieces.items())
        return b'{"index":%d,%b"finish_reason":%b}' % (index, lists, to_json(reason))


def with_token_field(body: dict[str, Any], prompt: bytes, choices: Sequence[bytes]) -> bytes:
    """The JSON of an answer whose last field is `areno`. prompt: the object of what is told of the prompt."""
    return b'%b,"areno":%b,"choices":[%b]}}' % (to_json(body)[:-1], prompt[:-1], b",".join(choices))


def tail(output: GenerationOutput, field: str, start: int) -> list[Any]:
    """The numbers of a field from `start` on. Of an array, only these become objects."""
    numbers = vars(output)[field][start:]
    return numbers if isinstance(numbers, list) else numbers.tolist()


END = b"data: [DONE]\n\n"
"""The last event of a stream."""


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event. (pydantic_core writes lists of numbers seven times as fast as json does.)"""
    return b"data: %b\n\n" % to_json(data)
