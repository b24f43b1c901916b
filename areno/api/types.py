"""What a training loop passes around: prompts, their samples, the rewards of these. Plain records, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from areno.engine.types import FinishReason, TrainSequence

Message = dict[str, Any]
Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True)
class PromptItem:
    """One row of an RL dataset, ready to be sampled.

    prompt: the row's own text; for a row of messages, the text these render to.
    text: what the model reads, that is, `prompt` after the chat template; `tokens` are its ids.
    messages: the row's messages, None for a row of plain text. solutions: the row's reference answers, None if it has
    none.
    record: the whole row. index: its number in the dataset.
    """

    prompt: str
    text: str
    tokens: list[int]
    messages: list[Message] | None = None
    solutions: Any = None
    record: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0


@dataclass(slots=True, kw_only=True)
class PairItem:
    """One row of a preference dataset, encoded: the same prompt with two answers. index: its number in the dataset."""

    chosen: TrainSequence
    rejected: TrainSequence
    index: int = 0

    @property
    def tokens(self) -> list[int]:
        """Of the longer row, which decides whether the pair is too long."""
        return max(self.chosen.tokens or [], self.rejected.tokens or [], key=len)


@dataclass(kw_only=True)
class Batch(Generic[Item]):
    """The rows of one step. skipped_long: rows passed over, because they are too long, while this batch was filled.

    total_skipped_long: the same since the start of the run, this batch included.
    """

    items: list[Item]
    skipped_long: int = 0
    total_skipped_long: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.items)


class PromptBatch(Batch[PromptItem]):
    """Prompts of one RL step."""


class SequenceBatch(Batch[TrainSequence]):
    """Rows of one supervised step."""


class PairBatch(Batch[PairItem]):
    """Pairs of one DPO step."""


@dataclass(slots=True)
class ModelRole:
    """A model beside the policy, for Trainer.ensure_roles.

    name: "ref" scores log-probabilities, "critic" values, "reward" whole rows; other names are free.
    path: model folder or hub id. trainable: whether it has an optimizer (only models with values can be trained).
    optimizer_lr: of a trainable role; None takes that of the policy's optimizer.
    """

    name: str
    path: str
    trainable: bool
    optimizer_lr: float | None = None


@dataclass(slots=True, kw_only=True)
class RolloutSequence:
    """One sampled completion: its tokens, stop token included, and their log-probabilities when sampled."""

    resp_tokens: list[int]
    resp_logprobs: list[float]
    finish_reason: FinishReason = "stop"


@dataclass(slots=True, kw_only=True)
class RolloutResult:
    """All samples of one prompt."""

    prompt_tokens: list[int]
    sequences: list[RolloutSequence]


@dataclass(slots=True, kw_only=True)
class RewardRecord:
    """What a reward function is given: one completed sample.

    prompt, messages, solutions, record: see PromptItem; `messages` goes on to the end of the sample.
    completion: all text of the assistant. final_answer: its last turn. rendered_completion: the same as the model wrote
    it, special tokens included. tool_calls, tool_results: parsed calls and what the environment answered.
    tokens, logprobs, loss_mask: of the response, one entry each; loss_mask is True where the token is trained.
    """

    prompt: str = ""
    completion: str = ""
    final_answer: str = ""
    messages: list[Message] = field(default_factory=list)
    rendered_completion: str = ""
    tool_calls: list[Any] = field(default_factory=list)
    tool_results: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    solutions: Any = None
    record: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)

    @classmethod
    def of_completion(
        cls, item: PromptItem, sequence: RolloutSequence, completion: str, rendered: str | None = None
    ) -> RewardRecord:
        """The record of a single-turn sample: its text, and the same with special tokens where that differs."""
        asked = item.messages if item.messages is not None else [{"role": "user", "content": item.prompt}]
        return cls(
            prompt=item.prompt,
            completion=completion,
            final_answer=completion,
            messages=[*asked, {"role": "assistant", "content": completion}],
            rendered_completion=completion if rendered is None else rendered,
            tokens=sequence.resp_tokens,
            logprobs=sequence.resp_logprobs,
            loss_mask=[True] * len(sequence.resp_tokens),
            solutions=item.solutions,
            record=item.record,
            prompt_tokens=item.tokens,
        )


@dataclass(slots=True, frozen=True)
class RewardOutcome:
    """What came of scoring one sample. `value` is None unless status is "ok"; `message` then says why."""

    value: float | None
    status: Literal["ok", "timeout", "error"] = "ok"
    message: str = ""


@dataclass(slots=True, kw_only=True)
class ScoredSample:
    """One sample with all that is known of it: what logs and dumps show."""

    item: PromptItem
    sequence: RolloutSequence
    completion: str
    outcome: RewardOutcome
