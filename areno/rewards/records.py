"""The record of a single completion on its way to a reward function.

A RewardRecord has lists of numbers, and much that all samples of a prompt share. To pickle them takes the driver longer
than all else that it does for a sample. So what it sends is small, and becomes a RewardRecord where it is read.

What a reward is, given what the functions returned for a sample: one number, and the parts that it is made of.
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
    """A prompt for the records of its samples. n_tokens: of the prompt."""

    def __init__(self, item: PromptItem):
        self.item, self.n_tokens = item, len(item.tokens)

    @cached_property
    def pickled(self) -> bytes:
        """The item. It may hold objects of a dataset, which may raise anything here."""
        return pickle.dumps(self.item, pickle.HIGHEST_PROTOCOL)


@dataclass(slots=True)
class CompletionRecord:
    """What becomes a RewardRecord where it is unpickled. arrays: of prompt and completion. rendered: with special
    tokens. step, epoch: see RewardRecord.
    """

    asked: RecordedPrompt
    arrays: TokenArrays
    completion: str
    rendered: str
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
        return _record_of, (self.asked.pickled, *numbers, self.completion, self.rendered, self.step, self.epoch)


Record = RewardRecord | CompletionRecord


def _record_of(
    pickled: bytes, tokens: bytes, logprobs: bytes, completion: str, rendered: str, step: int, epoch: int
) -> RewardRecord:
    item: PromptItem = pickle.loads(pickled)
    asked = item.messages if item.messages is not None else [{"role": "user", "content": item.prompt}]
    token_ids = array("q", tokens).tolist()  # not by numpy, which takes a reward process longer to import than the rest
    return RewardRecord(
        prompt=item.prompt,
        completion=completion,
        final_answer=completion,
        messages=[*asked, {"role": "assistant", "content": completion}],
        rendered_completion=rendered,
        tokens=token_ids,
        logprobs=array("d", logprobs).tolist(),
        loss_mask=[True] * len(token_ids),
        solutions=item.solutions,
        record=item.record,
        prompt_tokens=item.tokens,
        step=step,
        epoch=epoch,
    )


_LARGEST = 3.4028234663852886e38  # of float32, which training computes with
_TOTAL = ("reward", "score")  # in a dictionary; verl's functions return a score


class Answer(NamedTuple):
    """An outcome, as it is sent. parts: name -> number, unweighted."""

    status: str
    value: float | None = None
    message: str = ""
    parts: dict[str, float] = {}  # noqa: RUF012  # never changed


class NotFinite(ValueError):
    """A number is NaN, infinite or too large."""


def verdict(results: Sequence[tuple[str, float, Any]]) -> Answer:
    """The answer for a sample. results: name, weight and what was returned, for each function.

    A number is the reward of a function. A dictionary has it under "reward" (or "score") beside its parts; without
    these, it is the sum of the parts. Of several functions, each is a part under its name, and the reward is the sum of
    their values times their weights; one that returned None has no opinion of this sample. The only function has the
    name "", and must have one.
    """
    values, parts = [], {}
    try:
        for name, weight, result in results:
            if name and result is None:
                continue
            value, inner = _read(result, f"{name} " if name else "")
            values.append(weight * value)
            parts |= {name: value} if name else {}
            parts |= {f"{name}/{part}" if name else part: number for part, number in inner.items()}
        if not values:
            return Answer("error", None, "every function returned None; at least one has to give a reward")
        return Answer("ok", reward_number(math.fsum(values), "the weighted sum is"), "", parts)
    except NotFinite as error:
        return Answer("not_finite", None, str(error))
    except Exception as error:  # __float__ may raise anything
        return Answer("error", None, (str(error) or type(error).__name__)[:500])


def _read(result: Any, of: str) -> tuple[float, dict[str, float]]:
    """The value of one function and its parts."""
    if not isinstance(result, Mapping):
        return reward_number(result, f"{of}returned"), {}
    if not result or not all(isinstance(name, str) and name for name in result):
        raise TypeError(f"{of}returned {repr(result)[:80]}; a dictionary has numbers under names")
    found = {name: reward_number(value, f"{of}returned {name!r}:") for name, value in result.items()}
    total = next((name for name in _TOTAL if name in found), None)
    if total is None:
        return reward_number(math.fsum(found.values()), f"{of}returned parts with the sum"), found
    return found.pop(total), found


def reward_number(result: Any, said: str) -> float:
    """Return a reward as a float.

    Numbers, true and false (1 and 0) and scalars of numpy and torch are rewards. Text and complex numbers are not, even
    those of numpy, which float() would read.

    Args:
        result: What a reward function, an agent or an environment gave.
        said: The beginning of the error message, which the value follows.

    Raises:
        TypeError: It is no number.
        NotFinite: It is NaN, infinite or too large for float32.
        Exception: Whatever its `__float__` raises.
    """
    kind = type(result)
    is_complex = issubclass(kind, numbers.Complex) and not issubclass(kind, numbers.Real)
    if not hasattr(result, "__float__") or issubclass(kind, str | bytes) or is_complex:
        raise TypeError(f"{said} {repr(result)[:40]} ({type(result).__name__}); a reward is a number")
    value = float(result)
    if problem := reward_problem(value):
        raise NotFinite(f"{said} {problem}")
    return value


def reward_problem(value: float) -> str:
    """What is wrong with a number as a reward; "" if nothing is."""
    if not math.isfinite(value):
        return f"{value}; a reward is a finite number"
    return f"{value:g}; a reward is at most {_LARGEST:.2g} (float32)" if abs(value) > _LARGEST else ""
