"""The records that reward functions receive, and the conversion of their results to rewards.

A RewardRecord has long lists of token ids and log-probabilities, and the samples of a prompt share many of its fields.
Pickling it would take most of the driver's time per sample. So the driver sends a small CompletionRecord, which becomes
a RewardRecord when the reward process unpickles it.
"""

from __future__ import annotations

import math
import numbers
import pickle
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from areno.types import PromptItem, RewardRecord, TokenArrays


class RecordedPrompt:
    """A prompt that the records of all its samples share. It is pickled only once."""

    def __init__(self, item: PromptItem):
        self.item, self.n_tokens = item, len(item.tokens)

    @cached_property
    def pickled(self) -> bytes:
        """The pickled item. Pickling the objects in its row can raise any exception."""
        return pickle.dumps(self.item, pickle.HIGHEST_PROTOCOL)


@dataclass(slots=True)
class CompletionRecord:
    """The small form of a completion's record that is sent to a process. Unpickling it gives a RewardRecord."""

    asked: RecordedPrompt
    arrays: TokenArrays  # of the prompt and the completion
    completion: str  # without special tokens
    rendered: str  # with special tokens
    step: int = 0
    epoch: int = 0

    @property
    def prompt(self) -> str:
        return self.asked.item.prompt

    @property
    def solutions(self) -> Any:
        return self.asked.item.solutions

    def __reduce__(self) -> tuple[Any, ...]:
        arrays, start = self.arrays, self.asked.n_tokens
        numbers = arrays.tokens[start:].tobytes(), arrays.logprobs[start:].tobytes()
        return _unpickle_record, (self.asked.pickled, *numbers, self.completion, self.rendered, self.step, self.epoch)


Record = RewardRecord | CompletionRecord


def _unpickle_record(
    pickled: bytes, tokens: bytes, logprobs: bytes, completion: str, rendered: str, step: int, epoch: int
) -> RewardRecord:
    """Rebuild a RewardRecord. `tokens` are the bytes of int64 ids, `logprobs` those of float64 values."""
    # Not by numpy, whose import takes longer than the rest of a process's start.
    token_ids, values = array("q", tokens).tolist(), array("d", logprobs).tolist()
    return record_of_completion(pickle.loads(pickled), token_ids, values, completion, rendered, step, epoch)


def record_of_completion(
    item: PromptItem,
    tokens: list[int],
    logprobs: list[float],
    completion: str,
    rendered: str,
    step: int,
    epoch: int = 0,
) -> RewardRecord:
    """Make the record of a completion that no agent has produced.

    `completion` is its text without special tokens, `rendered` its text with them.
    """
    asked = item.messages if item.messages is not None else [{"role": "user", "content": item.prompt}]
    return RewardRecord(
        prompt=item.prompt,
        completion=completion,
        final_answer=completion,
        messages=[*asked, {"role": "assistant", "content": completion}],
        rendered_completion=rendered,
        tokens=tokens,
        logprobs=logprobs,
        loss_mask=[True] * len(tokens),
        solutions=item.solutions,
        record=item.record,
        prompt_tokens=item.tokens,
        step=step,
        epoch=epoch,
        source=item.source,
    )


_LARGEST = 3.4028234663852886e38  # the largest float32: training computes in float32
_TOTAL = ("reward", "score")  # names of the reward in a dictionary; functions for verl return a score


class RewardReply(NamedTuple):
    """The outcome for a sample, as a reward process sends it to the driver."""

    status: str  # "ok", "error", "timeout" or "not_finite"
    value: float | None = None
    message: str = ""
    parts: dict[str, float] = {}  # noqa: RUF012  # never changed


class NonFiniteRewardError(ValueError):
    """Raised for a reward that is NaN, infinite or too large for float32."""


def combine_results(results: Sequence[tuple[str, float, Any]]) -> RewardReply:
    """Combine the (name, weight, result) of all reward functions for a sample. The name "" marks the only function.

    A function returns a number, or a dictionary of named parts. The value of a dictionary is its entry "reward" (or
    "score") or, without such an entry, the sum of its parts. If there are several functions, the reward is the weighted
    sum of their values, and each value is also a part under the name of its function. A named function that returns
    None does not count. An invalid result gives the status "error" or "not_finite".
    """
    values, parts = [], {}
    try:
        for name, weight, result in results:
            if name and result is None:
                continue
            value, inner = _parse_result(result, f"{name} " if name else "")
            values.append(weight * value)
            parts |= {name: value} if name else {}
            parts |= {f"{name}/{part}" if name else part: number for part, number in inner.items()}
        if not values:
            return RewardReply("error", None, "every function returned None; at least one has to give a reward")
        return RewardReply("ok", reward_number(math.fsum(values), "the weighted sum is"), "", parts)
    except NonFiniteRewardError as error:
        return RewardReply("not_finite", None, str(error))
    except Exception as error:  # __float__ may raise anything
        return RewardReply("error", None, (str(error) or type(error).__name__)[:500])


def _parse_result(result: Any, prefix: str) -> tuple[float, dict[str, float]]:
    """Return (value, parts) for one function's result. Errors begin with `prefix`."""
    if not isinstance(result, Mapping):
        return reward_number(result, f"{prefix}returned"), {}
    if not result or not all(isinstance(name, str) and name for name in result):
        raise TypeError(f"{prefix}returned {repr(result)[:80]}; a dictionary has numbers under names")
    found = {name: reward_number(value, f"{prefix}returned {name!r}:") for name, value in result.items()}
    total = next((name for name in _TOTAL if name in found), None)
    if total is None:
        return reward_number(math.fsum(found.values()), f"{prefix}returned parts with the sum"), found
    return found.pop(total), found


def reward_number(result: Any, prefix: str) -> float:
    """Return a reward as a float. Errors begin with `prefix`.

    Numbers, booleans (as 1 and 0) and scalars from numpy and torch are accepted. Text and complex numbers are refused,
    even numpy's text scalars, which float() would parse. Raises TypeError, NotFinite or any exception of `__float__`.
    """
    kind = type(result)
    is_complex = issubclass(kind, numbers.Complex) and not issubclass(kind, numbers.Real)
    if not hasattr(result, "__float__") or issubclass(kind, str | bytes) or is_complex:
        raise TypeError(f"{prefix} {repr(result)[:40]} ({type(result).__name__}); a reward is a number")
    value = float(result)
    if problem := reward_problem(value):
        raise NonFiniteRewardError(f"{prefix} {problem}")
    return value


def reward_problem(value: float) -> str:
    """Return the reason why a float cannot be a reward (not finite, or too large for float32), or "" if it can."""
    if not math.isfinite(value):
        return f"{value}; a reward is a finite number"
    return f"{value:g}; a reward is at most {_LARGEST:.2g} (float32)" if abs(value) > _LARGEST else ""
