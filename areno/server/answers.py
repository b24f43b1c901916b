"""Functions that build the responses of /v1/chat/completions and /v1/completions.

The responses of both endpoints have the same first fields (`envelope`), `usage` and finish reasons, but different
`logprobs` objects. The extra field `areno` carries the token ids that training needs. `event` encodes one
server-sent event of a stream.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from areno.server.detokenize import TokenText, TokenTextCache
from areno.types import GenerationOutput, TokenScores

TokenScore = tuple[int, float | None, TokenScores]
"""(token id, log-probability or None for the first token of a prompt, most likely tokens at this position)."""

ScoredText = tuple[TokenScore, TokenText]


def scores_of(output: GenerationOutput) -> list[TokenScore]:
    """Pair each token of an output with its log-probability and the most likely tokens at its position.

    Args:
        output: A partial or finished output of the engine.

    Returns:
        One tuple (token id, log-probability, alternatives) for each token in `output.tokens`. The log-probability is
        raw if the request asked for raw ones. The alternatives are a list of (token id, log-probability), which is
        empty if the request asked for no alternatives.
    """
    top = output.top_logprobs or [[]] * len(output.tokens)
    return list(zip(output.tokens, output.raw_logprobs or output.logprobs, top, strict=True))


def envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return the fields with which every response begins.

    Args:
        kind: Value of `object`, such as "chat.completion".
        prefix: Prefix of the random `id`.
        model: Name of the model, as the request gave it.

    Returns:
        `id`, `object`, `created` (seconds since the epoch) and `model`.
    """
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(n_prompt: int, n_completion: int, n_cached: int) -> dict[str, Any]:
    """Return the `usage` object of an answer.

    Args:
        n_prompt: Number of tokens in all prompts of the request.
        n_completion: Number of sampled tokens in all choices.
        n_cached: Number of prompt tokens whose keys and values came from the prefix cache.

    Returns:
        `prompt_tokens`, `completion_tokens`, `total_tokens` and `prompt_tokens_details`.
    """
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def finish_reason(output: GenerationOutput) -> str:
    """Return the finish reason in the API's terms: "stop" or "length".

    Every finish reason of the engine other than "stop" becomes "length". This includes "abort", with which a completion
    ends when its grammar becomes too complex.

    Args:
        output: A finished sample.
    """
    return "stop" if output.finish_reason == "stop" else "length"


def chat_logprobs(texts: TokenTextCache, scores: Iterable[ScoredText]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice.

    Args:
        texts: Cache that gives the text and bytes of the alternative tokens.
        scores: A tuple (TokenScore, TokenText) for each token of the choice, in order. The TokenScore has the id and
            the log-probabilities, and the TokenText has the text.

    Returns:
        A dictionary with `content`, a list with one entry for each token, and `refusal`, which is None.
        Log-probabilities below -9999 become -9999.
    """

    def named(text: str, data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}

    content = []
    for (token, logprob, top), token_text in scores:
        own = token_text.text, token_text.data
        others = [named(*(own if one == token else texts.of(one, token_text.is_first)), value) for one, value in top]
        content.append({**named(*own, logprob or 0.0), "top_logprobs": others})
    return {"content": content, "refusal": None}


def text_logprobs(texts: TokenTextCache, scores: Sequence[ScoredText], n_top: int, offset: int = 0) -> dict[str, Any]:
    """Return the `logprobs` object of a choice of /v1/completions.

    If two tokens at one position have the same text, they get distinct names, because the names are the keys of a JSON
    object.

    Args:
        texts: Cache that gives the text of the alternative tokens.
        scores: A tuple (TokenScore, TokenText) for each token, in order. The TokenScore has the id and the
            log-probabilities, and the TokenText has the text.
        n_top: Number of alternatives that the request asked for. 0 makes `top_logprobs` None.
        offset: Number of characters in the choice's text before the first token of `scores`.

    Returns:
        A dictionary with the lists `tokens`, `token_logprobs`, `top_logprobs` and `text_offset`. Each list has one
        element for each token. The first token of a prompt has None in `token_logprobs` and `top_logprobs`.
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
                found[texts.key(one, token_text.is_first, found)] = value
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
    """Return the value of the extra field `areno` of a response, which carries token ids and log-probabilities.

    Args:
        prompt: Fields about the prompt, such as `prompt_token_ids`.
        outputs: The finished samples, one for each choice.
        digests: Hashes of the message of each choice. Empty for choices without a message.

    Returns:
        The fields of `prompt`, and `choices`, a list with one dictionary for each sample. Its keys are "index",
        "token_ids", "logprobs", "versions" (of the weights), "finish_reason" and, with `digests`, "message".
    """
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
    """Incremental JSON encoder of one choice's entry in the extra field `areno`.

    The result equals the entry that `token_field` builds at the end. Encoding the tokens while they are sampled avoids
    a long pause when many samples finish at once.
    """

    _LISTS = (("token_ids", "tokens"), ("logprobs", "logprobs"), ("versions", "versions"))

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {name: [] for name, _ in self._LISTS}
        self._n_written = 0

    def add(self, output: GenerationOutput) -> None:
        """Encode the tokens of an output that are not encoded yet.

        Args:
            output: The next output of the engine for this choice. A finished output has the whole completion, and only
                its new tokens are encoded.
        """
        start = 0 if output.finish_reason is None else self._n_written
        numbers: list[Any] = []
        for name, field in self._LISTS:
            if numbers := tail(output, field, start):
                self._pieces[name].append(to_json(numbers)[1:-1])
        self._n_written += len(numbers)

    def text(self, index: int, reason: str | None, digest: Mapping[str, str]) -> bytes:
        """Return the JSON object of the choice, with all tokens added so far.

        Args:
            index: Index of the choice in the response.
            reason: Finish reason of the engine, or None for null.
            digest: Hashes of the message of the choice.
        """
        lists = b"".join(b'"%b":[%b],' % (name.encode(), b",".join(parts)) for name, parts in self._pieces.items())
        return b'{"index":%d,%b"finish_reason":%b,"message":%b}' % (index, lists, to_json(reason), to_json(digest))


def with_token_field(body: dict[str, Any], prompt: bytes, choices: Sequence[bytes]) -> bytes:
    """Return the JSON of a response with `areno` as its last field.

    Args:
        body: All other fields of the response.
        prompt: JSON object with the fields of `areno` about the prompt.
        choices: JSON object of each choice, from `TokenFieldWriter.text`.
    """
    return b'%b,"areno":%b,"choices":[%b]}}' % (to_json(body)[:-1], prompt[:-1], b",".join(choices))


def tail(output: GenerationOutput, field: str, start: int) -> list[Any]:
    """Return the values of a per-token field from index `start` on, as a list.

    Args:
        output: An output of the engine.
        field: Name of a list or array field of `output`, such as "logprobs".
        start: Index of the first token. Only values from here on are converted to Python objects.
    """
    numbers = vars(output)[field][start:]
    return numbers if isinstance(numbers, list) else numbers.tolist()


END = b"data: [DONE]\n\n"
"""The last event of a stream."""


def event(data: dict[str, Any]) -> bytes:
    """Encode one server-sent event.

    pydantic_core encodes lists of numbers seven times as fast as `json`.

    Args:
        data: JSON object of the event.

    Returns:
        The event as sent, `data: {...}` and an empty line.
    """
    return b"data: %b\n\n" % to_json(data)
