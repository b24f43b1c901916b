"""Rows of datasets, encoded, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np

from areno.types.training import TrainSequence

Message = dict[str, Any]
Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True)
class PromptItem:
    """One row of a dataset of prompts, with the token ids to sample from.

    Attributes:
        prompt: The prompt of the row before the chat template. For a row of messages, the rendered text.
        text: The text that the model reads: `prompt` after the chat template.
        tokens: Token ids of `text`.
        messages: Chat messages of the row. None for a row of plain text.
        solutions: Reference answers. None if the row has none.
        record: The whole row, column -> value.
        index: Index of the row in the dataset.
        teacher_tokens: Token ids of the prompt that a teacher reads (teacher.prompt_key). None: the same prompt.
        source: Name of the source of the row (train_dataset.sources). "" if there is only one.
    """

    prompt: str
    text: str
    tokens: list[int]
    messages: list[Message] | None = None
    solutions: Any = None
    record: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    teacher_tokens: list[int] | None = None
    source: str = ""


@dataclass(slots=True, kw_only=True)
class PairItem:
    """One row of a preference dataset, encoded: one prompt with two answers.

    Attributes:
        chosen: Prompt and preferred answer as a training row.
        rejected: Prompt and rejected answer as a training row.
        index: Index of the row in the dataset.
    """

    chosen: TrainSequence
    rejected: TrainSequence
    index: int = 0

    @property
    def tokens(self) -> list[int] | np.ndarray:
        """Token ids of the longer of the two rows. Its length decides whether the pair is too long."""
        rows = (self.chosen.tokens, self.rejected.tokens)
        return max(([] if tokens is None else tokens for tokens in rows), key=len)


@dataclass(slots=True, kw_only=True)
class AnswersItem:
    """One row of a dataset, encoded: one or more answers that are trained together, each after its prompt.

    Attributes:
        rows: Prompt and answer as a training row, for each answer. Ranked answers begin with the best, and the `reward`
            of a row is the label or the rating of its answer. For supervised fine-tuning, a conversation is one row, or
            a row for each turn of the assistant.
        index: Index of the row in the dataset.
    """

    rows: list[TrainSequence]
    index: int = 0

    @property
    def tokens(self) -> list[int] | np.ndarray:
        """Token ids of the longest row. Its length decides whether the item is too long."""
        return max(([] if row.tokens is None else row.tokens for row in self.rows), key=len)


@dataclass(kw_only=True)
class Batch(Generic[Item]):
    """Dataset rows that are read together, such as the rows of one training step.

    Attributes:
        items: The rows, such as PromptItem or PairItem.
        skipped_long: Number of rows that were skipped as too long while this batch was filled.
        total_skipped_long: Number of rows that were skipped as too long since the start of the run.
        skipped_ties: Number of rows that were skipped as ties (no answer is preferred) while this batch was filled.
        total_skipped_ties: Number of rows that were skipped as ties since the start of the run.
        epoch: Index of the epoch, from 0.
        ends_epoch: Whether this is the last batch of its epoch.
    """

    items: list[Item]
    skipped_long: int = 0
    total_skipped_long: int = 0
    skipped_ties: int = 0
    total_skipped_ties: int = 0
    epoch: int = 0
    ends_epoch: bool = False

    def __len__(self) -> int:
        return len(self.items)


PromptBatch = Batch[PromptItem]  # the prompts of one RL step
