"""Responses of the server, as an agent returned them.

The agent had them in its hands, so nothing is taken as valid: what is wrong would otherwise end the run in the
tokenizer, the loss, the model or the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areno.config.rollout import LEAST_TEMPERATURE, MOST_TEMPERATURE
from areno.schema.values import show
from areno.server.errors import BadTrajectory
from areno.server.tokens import Runs, Source
from areno.types import SamplingParams

_LEAST = -1e30  # training holds log-probabilities in float32
_ROUNDING = 1e-3  # of the log-probability of a token that is nearly certain
_MOST_VERSION = 2**31 - 1
_LEAVES = {str, int, float, bool, type(None)}


@dataclass(slots=True, kw_only=True)
class TurnTokens:
    """What the model read and wrote in one turn.

    Attributes:
        prompt: Token ids that it read, at least one.
        sources: Where they come from, in runs.
        sampled: Token ids that it wrote, at least one.
        logprobs: Log-probability of each of them, finite and not positive.
        versions: The version of the weights that sampled each of them.
        temperature: That all of them were sampled at.
    """

    prompt: list[int]
    sources: Runs
    sampled: list[int]
    logprobs: list[float]
    versions: list[int]
    temperature: float

    @classmethod
    def read(cls, told: Mapping[str, Any], vocab_size: int) -> TurnTokens:
        """Return the tokens of a response. Raises BadTrajectory, naming the field that is not as the server wrote it.

        Args:
            told: The field `areno` of the response.
            vocab_size: Token ids of the model.
        """
        choices = told.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, Mapping):
            raise BadTrajectory(f"the choices of its tokens are {show(choices)}; a list of objects is expected")
        prompt = _whole_numbers(told, "prompt_token_ids", vocab_size - 1)
        sampled = _whole_numbers(choice, "token_ids", vocab_size - 1)
        return cls(
            prompt=prompt,
            sources=_sources(told.get("sources"), len(prompt)),
            sampled=sampled,
            logprobs=_logprobs(choice, len(sampled)),
            versions=_whole_numbers(choice, "versions", _MOST_VERSION, len(sampled)),
            temperature=_temperature(told.get("temperature")),
        )


def _numbers(values: Mapping[str, Any], name: str, kinds: set[type], n: int | None) -> list[Any]:
    """Return a list of at least one number, of `n` where that is given."""
    numbers = values.get(name)
    if not isinstance(numbers, list) or not numbers:
        raise BadTrajectory(f"{name} is {show(numbers)}; a list of numbers is expected")
    if not kinds.issuperset(map(type, numbers)):
        wrong = next(number for number in numbers if type(number) not in kinds)
        raise BadTrajectory(f"{name} holds {show(wrong)}; {'whole ' if float not in kinds else ''}numbers are expected")
    if n is not None and len(numbers) != n:
        raise BadTrajectory(f"{name} has {len(numbers)} numbers for {n} tokens")
    return numbers


def _whole_numbers(values: Mapping[str, Any], name: str, most: int, n: int | None = None) -> list[int]:
    numbers = _numbers(values, name, {int}, n)
    if min(numbers) < 0 or max(numbers) > most:
        wrong = min(numbers) if min(numbers) < 0 else max(numbers)
        raise BadTrajectory(f"{name} holds {show(wrong)}; numbers from 0 to {most} are expected")
    return numbers


def _logprobs(choice: Mapping[str, Any], n: int) -> list[float]:
    numbers = _numbers(choice, "logprobs", {int, float}, n)
    if wrong := [number for number in numbers if not _LEAST < number <= _ROUNDING]:  # true for NaN, too
        raise BadTrajectory(f"logprobs holds {show(wrong[0])}; a log-probability is finite and not positive")
    return numbers


def _sources(runs: Any, n: int) -> Runs:
    """Return the runs as pairs, which together have one source for each of `n` tokens."""
    known = {int(source) for source in Source}
    pairs = runs if isinstance(runs, list) else []
    good = all(
        isinstance(pair, list | tuple) and len(pair) == 2 and {int}.issuperset(map(type, pair)) for pair in pairs
    )
    if not good or any(source not in known or length < 0 for source, length in pairs):
        raise BadTrajectory(f"sources is {show(runs)}; pairs of a source and a number of tokens are expected")
    if (total := sum(length for _, length in pairs)) != n:
        raise BadTrajectory(f"sources is of {show(total)} tokens, and the prompt has {n}")
    return [(source, length) for source, length in pairs]


def sampled_with(params: SamplingParams) -> dict[str, float]:
    """Return the entries of the field `areno` that say how the tokens were sampled, as `TurnTokens.read` reads them."""
    return {"temperature": params.logprob_temperature}


def _temperature(value: Any) -> float:
    if type(value) not in (int, float) or not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        raise BadTrajectory(f"temperature is {show(value)}; that of the request is expected")
    return float(value)


def read_response(response: Any) -> dict[str, Any]:
    """Return message, finish_reason and tokens of a response or, of a stream, of its chunks, as plain values.

    Raises BadTrajectory without the field `areno`, and some other error for what no client makes.
    """
    response = _joined([plain(chunk) for chunk in response]) if isinstance(response, list) else plain(response)
    tokens = response.get("areno") if isinstance(response, Mapping) else None
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(tokens, Mapping) or not choices:
        raise BadTrajectory(
            "the response of a turn does not have its tokens (the field areno); return the responses of the client as "
            "they are, and send requests to ctx.get_base_url()"
        )
    message = {name: value for name, value in choices[0]["message"].items() if value is not None}
    reason = choices[0].get("finish_reason")
    if not isinstance(message.get("content", ""), str) or not isinstance(reason, str | None):
        raise TypeError("content and finish_reason of a message are text")
    if not all(isinstance(call, dict) for call in message.get("tool_calls", [])):
        raise TypeError("tool_calls of a message are objects")
    if not _is_plain(tokens):
        raise TypeError("its tokens are lists of numbers")
    return {"message": message, "finish_reason": reason, "tokens": tokens}


def check_json(value: Any) -> None:
    """Raise TypeError, ValueError or RecursionError for what the files of a run cannot hold."""
    json.dumps(value, ensure_ascii=False).encode()


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of what JSON has, so that another process can read it."""
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return _LEAVES.issuperset(map(type, value)) or all(map(_is_plain, value))
    return type(value) in _LEAVES


def _joined(chunks: list[Any]) -> dict[str, Any]:
    """The chunks of a stream as the response that they make up."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    found: dict[str, Any] = {"choices": [{"message": message, "finish_reason": None}]}
    for chunk in chunks:
        found["areno"] = chunk.get("areno") or found.get("areno")
        for choice in chunk.get("choices") or []:
            if choice.get("index"):
                continue
            delta = choice.get("delta") or {}
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls") or []:
                message.setdefault("tool_calls", []).append({name: call[name] for name in ("id", "type", "function")})
            found["choices"][0]["finish_reason"] = choice.get("finish_reason") or found["choices"][0]["finish_reason"]
    return found


def plain(value: Any) -> Any:
    """A value with the client's objects as dictionaries, in the form in which the client would send them."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value
