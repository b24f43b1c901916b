"""Functions that build the responses of /v1/chat/completions and /v1/completions.

The extra field `areno` carries the token ids and log-probabilities that training needs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from areno.server.detokenize import TextStream, TokenText, TokenTextCache, TokenTextStream
from areno.types import GenerationOutput, TokenScores

TokenScore = tuple[int, float | None, TokenScores]
"""(token id, log-probability or None for the first token of a prompt, most likely tokens at this position)."""

ScoredText = tuple[TokenScore, TokenText]


def token_scores(output: GenerationOutput) -> list[TokenScore]:
    top = output.top_logprobs or [[]] * len(output.tokens)
    return list(zip(output.tokens, output.raw_logprobs or output.logprobs, top, strict=True))


class SampleDecoder:
    """Decodes one sample incrementally into text and, with `token_texts`, tokens with text and log-probabilities."""

    def __init__(self, stream: TextStream, token_texts: TokenTextStream | None):
        self._stream, self._token_texts = stream, token_texts
        self._n_taken = self._n_characters = 0
        self.new_tokens: list[int] = []  # of the last call of `decode`
        self._scores: list[TokenScore] = []  # of tokens whose text is not certain yet

    def decode(self, output: GenerationOutput) -> tuple[str, list[ScoredText]]:
        """Return the new text that later tokens cannot change, and the tokens whose text is completely returned."""
        is_last = output.finish_reason is not None
        start = self._n_taken if is_last else 0  # the last one has the whole completion
        tokens = self.new_tokens = field_values_from(output, "tokens", start)
        self._n_taken += len(tokens)
        text = self._stream.feed(tokens, is_last)
        if self._token_texts is None:
            return text, []
        self._n_characters += len(text)
        self._scores += token_scores(output)[start:]
        self._token_texts.feed(tokens)
        finish = self._token_texts.finish if is_last else self._token_texts.pop_tokens
        found = list(zip(self._scores, finish(self._n_characters), strict=False))
        del self._scores[: len(found)]
        return text, found


def response_envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return the fields with which every response begins. `kind` is the value of `object`, `prefix` begins the `id`."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage_field(n_prompt: int, n_completion: int, n_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def finish_reason(output: GenerationOutput) -> str:
    """Return "stop" or "length". The latter includes "abort", which ends a completion whose grammar got too complex."""
    return "stop" if output.finish_reason == "stop" else "length"


def chat_logprobs(texts: TokenTextCache, scores: Iterable[ScoredText]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice. Values below -9999 become -9999."""

    def token_entry(text: str, data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}

    content = []
    for (token, logprob, top), token_text in scores:
        own = token_text.text, token_text.data
        others = [
            token_entry(*(own if one == token else texts.lookup(one, token_text.is_first)), value) for one, value in top
        ]
        content.append({**token_entry(*own, logprob or 0.0), "top_logprobs": others})
    return {"content": content, "refusal": None}


def text_logprobs(texts: TokenTextCache, scores: Sequence[ScoredText], n_top: int, offset: int = 0) -> dict[str, Any]:
    """Return the `logprobs` object of a choice of /v1/completions, whose lists have one element for each token.

    Alternatives are keys of a JSON object, so two tokens with the same text get distinct names. `offset` is the number
    of characters of the choice before the first token of `scores`.
    """
    offsets, tops = list[int](), list[dict[str, float] | None]()
    for (token, logprob, top), token_text in scores:
        offsets.append(offset)
        offset += len(token_text.text)
        if logprob is None:
            tops.append(None)
            continue
        found = {token_text.text: logprob}
        for one, value in top:
            if one != token:
                found[texts.token_name(one, token_text.is_first, found)] = value
        tops.append(found)
    return {
        "tokens": [token_text.text for _, token_text in scores],
        "token_logprobs": [logprob for (_, logprob, _), _ in scores],
        "top_logprobs": tops if n_top else None,
        "text_offset": offsets,
    }


def token_field(
    prompt: dict[str, Any], outputs: Iterable[GenerationOutput], digests: Sequence[Mapping[str, str]] = ()
) -> dict[str, Any]:
    """Return the field `areno` of a response. `digests` has the hashes of each message, if choices have messages."""
    choices = [
        {
            "index": index,
            "token_ids": output.tokens,
            "logprobs": output.logprobs,
            "versions": output.versions,
            "finish_reason": output.finish_reason,
            **({"message": digests[index]} if digests else {}),
        }
        for index, output in enumerate(outputs)
    ]
    return {**prompt, "choices": choices}


class TokenFieldWriter:
    """Incremental JSON encoder of one entry of `choices` in the field `areno`, equal to what `token_field` builds.

    Encoding the tokens while they are sampled avoids a long pause when many samples finish at once.
    """

    _LISTS = (("token_ids", "tokens"), ("logprobs", "logprobs"), ("versions", "versions"))

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {name: [] for name, _ in self._LISTS}
        self._n_written = 0

    def add(self, output: GenerationOutput) -> None:
        """Encode the new tokens of an output. A finished output has the whole completion."""
        start = 0 if output.finish_reason is None else self._n_written
        numbers: list[Any] = []
        for name, field in self._LISTS:
            if numbers := field_values_from(output, field, start):
                self._pieces[name].append(to_json(numbers)[1:-1])
        self._n_written += len(numbers)

    def choice_bytes(self, index: int, reason: str | None, digest: Mapping[str, str]) -> bytes:
        lists = b"".join(b'"%b":[%b],' % (name.encode(), b",".join(parts)) for name, parts in self._pieces.items())
        return b'{"index":%d,%b"finish_reason":%b,"message":%b}' % (index, lists, to_json(reason), to_json(digest))


def with_token_field(body: dict[str, Any], prompt: bytes, choices: Sequence[bytes]) -> bytes:
    """Append the field `areno` to a response, and return its JSON. `prompt` and `choices` are JSON objects."""
    return b'%b,"areno":%b,"choices":[%b]}}' % (to_json(body)[:-1], prompt[:-1], b",".join(choices))


def field_values_from(output: GenerationOutput, field: str, start: int) -> list[Any]:
    """Return the values of a per-token field from index `start` on, without making Python objects of earlier ones."""
    numbers = vars(output)[field][start:]
    return numbers if isinstance(numbers, list) else numbers.tolist()


END = b"data: [DONE]\n\n"  # the last event of a stream


def server_sent_event(data: dict[str, Any], name: str = "") -> bytes:
    """Encode one server-sent event. pydantic_core encodes lists of numbers seven times as fast as `json`."""
    return (b"event: %b\n" % name.encode() if name else b"") + b"data: %b\n\n" % to_json(data)
