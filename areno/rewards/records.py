"""Records that are sent to reward functions, and rewards made of what the functions return.

A RewardRecord has long lists of numbers, and the samples of a prompt share many of its fields. Pickling it would take
most of the driver's time for a sample. So the driver sends a small CompletionRecord, which becomes a RewardRecord when
the reward process unpickles it.
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
    """A prompt that the records of its samples share.

    Attributes:
        item: The prompt.
        n_tokens: The length of the prompt.
    """

    def __init__(self, item: PromptItem):
        self.item, self.n_tokens = item, len(item.tokens)

    @cached_property
    def pickled(self) -> bytes:
        """Return the pickled item. Objects of a dataset may raise anything here."""
        return pickle.dumps(self.item, pickle.HIGHEST_PROTOCOL)


@dataclass(slots=True)
class CompletionRecord:
    """The record of one completion. Unpickling it returns a RewardRecord.

    Attributes:
        asked: The prompt.
        arrays: The tokens and log-probabilities of prompt and completion.
        completion: The text of the completion.
        rendered: The same with special tokens.
        step: See RewardRecord.
        epoch: See RewardRecord.
    """

    asked: RecordedPrompt
    arrays: TokenArrays
    completion: str
    rendered: str
    step: int = 0
    epoch: int = 0

    @property
    def prompt(self) -> str:
        """Return the text of the prompt."""
        return self.asked.item.prompt

    @property
    def solutions(self) -> Any:
        """Return the reference answers of the row."""
        return self.asked.item.solutions

    def __reduce__(self) -> tuple[Any, ...]:
        arrays, start = self.arrays, self.asked.n_tokens
        numbers = arrays.tokens[start:].tobytes(), arrays.logprobs[start:].tobytes()
        return _record_of, (self.asked.pickled, *numbers, self.completion, self.rendered, self.step, self.epoch)


Record = RewardRecord | CompletionRecord


def _record_of(
    pickled: bytes, tokens: bytes, logprobs: bytes, completion: str, rendered: str, step: int, epoch: int
) -> RewardRecord:
    """Make the RewardRecord in the reward process."""
    item: PromptItem = pickle.loads(pickled)
    asked = item.messages if item.messages is not None else [{"role": "user", "content": item.prompt}]
    token_ids = array(
        "q", tokens
    ).tolist()  # not by numpy, whose import takes longer than the rest of a process's start
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


_LARGEST = 3.4028234663852886e38  # the largest float32: training computes in float32
_TOTAL = ("reward", "score")  # names of the reward in a dictionary; functions for verl return a score


class Answer(NamedTuple):
    """The outcome of a sample, as a reward process sends it.

    Attributes:
        status: "ok", "error", "timeout" or "not_finite".
        value: The reward; None without one.
        message: Why there is no reward.
        parts: The parts of the reward by name, without weights.
    """

    status: str
    value: float | None = None
    message: str = ""
    parts: dict[str, float] = {}  # noqa: RUF012  # never changed


class NotFinite(ValueError):
    """A reward is NaN, infinite or too large for float32."""


def verdict(results: Sequence[tuple[str, float, Any]]) -> Answer:
    """Combine the results of the functions for a sample.

    A function returns a number, or a dictionary with "reward" (or "score") and named parts. The reward of a dictionary
    without these names is the sum of its parts. With several functions, each is a part under its name, and the reward
    is the weighted sum. A function that returns None is left out of the sum.

    Args:
        results: Name, weight and result of each function. The name "" marks the only function, which may not return
            None.

    Returns:
        The answer. An invalid result is an answer with status "error" or "not_finite".
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
    """Return the value of one function, and its parts."""
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
    """Return why a number is no reward; "" for a valid one."""
    if not math.isfinite(value):
        return f"{value}; a reward is a finite number"
    return f"{value:g}; a reward is at most {_LARGEST:.2g} (float32)" if abs(value) > _LARGEST else ""
