"""The record of a single completion on its way to a reward function.

A RewardRecord has lists of numbers, and much that all samples of a prompt share. To pickle them takes the driver longer
than all else that it does for a sample. So what it sends is small, and becomes a RewardRecord where it is read.
"""

from __future__ import annotations

import pickle
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
