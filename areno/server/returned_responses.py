"""Checks of the server's responses that an agent returns for training.

User code may have changed them, and a wrong value would otherwise fail only later, in the tokenizer or the loss. A
wrong field raises BadTrajectory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from areno.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE
from areno.schema.values import format_value
from areno.server.errors import BadTrajectory, exceeds_depth
from areno.server.json_bodies import MAX_DEPTH
from areno.server.messages import extended_key
from areno.server.token_sources import Runs, TokenSource
from areno.types import SamplingParams

_MIN_LOGPROB = -1e30  # training holds log-probabilities in float32
_MAX_LOGPROB = 1e-3  # rounding may put a token that is nearly certain slightly above 0
_MAX_VERSION = 2**31 - 1
_SCALARS = {str, int, float, bool, type(None)}


@dataclass(slots=True, kw_only=True)
class TurnTokens:
    """The prompt that the model read in one turn and the completion that it sampled, each with at least one token."""

    prompt: list[int]
    sources: Runs
    sampled: list[int]
    message: dict[str, str]  # hashes of its parts, see `message_digest`
    logprobs: list[float]
    versions: list[int]  # of the weights, for each sampled token
    temperature: float
    keys: list[str] = field(default_factory=list)  # `conversation_keys` of the request, if a session recorded the turn

    @classmethod
    def read(cls, values: Mapping[str, Any], vocab_size: int) -> TurnTokens:
        """Check the field `areno` of a response with one choice, and read the turn from it."""
        choices = values.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, Mapping):
            raise BadTrajectory(f"the choices of its tokens are {format_value(choices)}; a list of objects is expected")
        prompt = _whole_numbers(values, "prompt_token_ids", vocab_size - 1)
        sampled = _whole_numbers(choice, "token_ids", vocab_size - 1)
        return cls(
            prompt=prompt,
            sources=_checked_runs(values.get("sources"), len(prompt)),
            sampled=sampled,
            message=_checked_digest(choice),
            logprobs=_logprobs(choice, len(sampled)),
            versions=_whole_numbers(choice, "versions", _MAX_VERSION, len(sampled)),
            temperature=_temperature(values.get("temperature")),
        )


def _number_list(values: Mapping[str, Any], name: str, kinds: set[type], n: int | None) -> list[Any]:
    """Return the field `name`, a list of `n` numbers. If `n` is None, any length except 0 is allowed."""
    numbers = values.get(name)
    if not isinstance(numbers, list) or not numbers:
        raise BadTrajectory(f"{name} is {format_value(numbers)}; a list of numbers is expected")
    if not kinds.issuperset(map(type, numbers)):
        wrong = next(number for number in numbers if type(number) not in kinds)
        raise BadTrajectory(
            f"{name} holds {format_value(wrong)}; {'whole ' if float not in kinds else ''}numbers are expected"
        )
    if n is not None and len(numbers) != n:
        raise BadTrajectory(f"{name} has {len(numbers)} numbers for {n} tokens")
    return numbers


def _whole_numbers(values: Mapping[str, Any], name: str, maximum: int, n: int | None = None) -> list[int]:
    numbers = _number_list(values, name, {int}, n)
    if min(numbers) < 0 or max(numbers) > maximum:
        wrong = min(numbers) if min(numbers) < 0 else max(numbers)
        raise BadTrajectory(f"{name} holds {format_value(wrong)}; numbers from 0 to {maximum} are expected")
    return numbers


def _logprobs(choice: Mapping[str, Any], n: int) -> list[float]:
    numbers = _number_list(choice, "logprobs", {int, float}, n)
    if wrong := [number for number in numbers if not _MIN_LOGPROB < number <= _MAX_LOGPROB]:  # catches NaN, too
        raise BadTrajectory(f"logprobs holds {format_value(wrong[0])}; a log-probability is finite and not positive")
    return numbers


def _checked_runs(runs: Any, n: int) -> Runs:
    known = {int(source) for source in TokenSource}
    pairs = runs if isinstance(runs, list) else []
    good = all(
        isinstance(pair, list | tuple) and len(pair) == 2 and {int}.issuperset(map(type, pair)) for pair in pairs
    )
    if not good or any(source not in known or length < 0 for source, length in pairs):
        raise BadTrajectory(f"sources is {format_value(runs)}; pairs of a source and a number of tokens are expected")
    if (total := sum(length for _, length in pairs)) != n:
        raise BadTrajectory(f"sources covers {format_value(total)} tokens, and the prompt has {n}")
    return [(source, length) for source, length in pairs]


def message_digest(message: Mapping[str, Any]) -> dict[str, str]:
    """Map each part of an assistant message, such as content, to its hash. Absent and null parts count as empty."""
    parts = {
        "content": message.get("content") or "",
        _REASONING: message.get(_REASONING) or message.get("reasoning") or "",
        "tool_calls": [_comparable_call(call) for call in message.get("tool_calls") or []],
    }
    return {name: extended_key("", {name: value}) for name, value in parts.items()}


_REASONING = "reasoning_content"
_EMPTY = message_digest({})


def _comparable_call(call: Any) -> Any:
    """Return (name, arguments) of a tool call. Arguments are compared as JSON values if they are JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = arguments if exceeds_depth(value, MAX_DEPTH) else value
    return function.get("name"), arguments


def changed_parts(message: Mapping[str, Any], sampled: Mapping[str, str]) -> list[str]:
    """Return the names of the parts whose hashes differ from those in `sampled`. Reasoning may be left out."""
    digest = message_digest(message)
    changed = [name for name in digest if digest[name] != sampled[name]]
    return [name for name in changed if name != _REASONING or digest[name] != _EMPTY[name]]


def _checked_digest(choice: Mapping[str, Any]) -> dict[str, str]:
    digest = choice.get("message")
    if not isinstance(digest, dict) or digest.keys() != _EMPTY.keys():
        raise BadTrajectory(f"message is {format_value(digest)}; the hashes of {', '.join(_EMPTY)} are expected")
    return digest


def sampling_fields(params: SamplingParams) -> dict[str, float]:
    """Return the sampling parameters that the field `areno` records, for `TurnTokens.read`."""
    return {"temperature": params.logprob_temperature}


def _temperature(value: Any) -> float:
    if type(value) not in (int, float) or not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise BadTrajectory(f"temperature is {format_value(value)}; the temperature of the request is expected")
    return float(value)


def read_response(response: Any) -> dict[str, Any]:
    """Return `message`, `finish_reason`, `tokens` (the field `areno` with this choice alone) and `choice` (id, index).

    `response` is a response object of OpenAI's client, the list of chunks of a streamed response, or dictionaries with
    the same fields. Raises BadTrajectory if the field `areno` is missing or there is not exactly one choice, and
    TypeError, KeyError, AttributeError or another error for a value that is no response.
    """
    response = (
        _join_chunks([to_plain(chunk) for chunk in response]) if isinstance(response, list) else to_plain(response)
    )
    tokens = response.get("areno") if isinstance(response, Mapping) else None
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(tokens, Mapping) or not choices:
        raise BadTrajectory(
            "the response of a turn does not have its tokens (the field areno); return the responses of the client as "
            "they are, and send requests to ctx.get_base_url()"
        )
    if isinstance(choices, list) and len(choices) > 1:
        raise BadTrajectory(
            f"the response of a turn has {len(choices)} choices; keep only the one that the agent went on with, such "
            "as response.choices = [response.choices[2]]; of a streamed response, keep the chunks of one index"
        )
    message = {name: value for name, value in choices[0]["message"].items() if value is not None}
    reason, index = choices[0].get("finish_reason"), choices[0].get("index", 0)
    if not isinstance(message.get("content", ""), str) or not isinstance(reason, str | None):
        raise TypeError("content and finish_reason of a message are text")
    if not all(isinstance(call, dict) for call in message.get("tool_calls", [])) or type(index) is not int:
        raise TypeError("tool_calls of a message are objects, and the index of a choice is a whole number")
    if not _is_plain(tokens):
        raise TypeError("its tokens are lists of numbers")
    sampled = tokens.get("choices")
    own = [one for one in sampled if not isinstance(one, dict) or one.get("index", 0) == index] if sampled else sampled
    if sampled and not own:
        raise BadTrajectory(
            f"the choice of a turn has the index {format_value(index)}, and the server sent no such choice"
        )
    tokens = {**tokens, "choices": own}
    key = [str(response.get("id") or ""), index]
    return {"message": message, "finish_reason": reason, "tokens": tokens, "choice": key}


def check_json(value: Any) -> None:
    """Raise TypeError, ValueError or RecursionError if a value cannot be written to the JSON files of a run."""
    json.dumps(value, ensure_ascii=False).encode()


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return _SCALARS.issuperset(map(type, value)) or all(map(_is_plain, value))
    return type(value) in _SCALARS


def _join_chunks(chunks: list[Any]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for chunk in chunks:
        found |= {name: chunk[name] for name in ("id", "areno") if chunk.get(name)}
        for one in chunk.get("choices") or []:
            index = one.get("index", 0)
            empty = {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None}
            choice, delta = choices.setdefault(index, empty), one.get("delta") or {}
            message = choice["message"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls") or []:
                message.setdefault("tool_calls", []).append({name: call[name] for name in ("id", "type", "function")})
            choice["finish_reason"] = one.get("finish_reason") or choice["finish_reason"]
    return {**found, "choices": list(choices.values())}


def to_plain(value: Any) -> Any:
    """Convert objects of OpenAI's client to dictionaries and lists, at any depth, without fields that were not set."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {name: to_plain(one) for name, one in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, list | tuple) else value


def index_of_response(turns: Sequence[Mapping[str, Any]], response_id: Any = None) -> int | None:
    """Return the index of the turn with a response, by default the last one. None if there is none.

    All dialects end the id of a response alike.
    """
    for index in reversed(range(len(turns))):
        suffix = turns[index]["choice"][0].removeprefix("chatcmpl-")
        if response_id is None or (isinstance(response_id, str) and suffix and response_id.endswith(suffix)):
            return index
    return None
