"""Samples with their trajectories and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

from areno.types.datasets import Message, PromptItem
from areno.types.sampling import RolloutSequence


@dataclass(slots=True, kw_only=True)
class TokenRow:
    """Consecutive tokens that a model read and wrote: one training row of an agent.

    Each array has one entry per token.

    Attributes:
        tokens: Token ids.
        sources: Origin of each token (chat template, system, user, tool or sampled), uint8, a value of
            areno.server.token_sources.Source.
        sampled: Whether the token was sampled in this row, bool.
        trained: Whether the loss trains on the token, bool. Tokens that were not sampled may be trained too.
        logprobs: Log-probability of each sampled token, float64. 0.0 for all other tokens.
        versions: Version of the weights that sampled the token, int64.
        temperature: Temperature at which all sampled tokens were drawn. None if the temperatures differ.
        turns: Index of the token's turn, in `Trajectory.turn_rewards`, int64. A token that was not sampled belongs to
            the turn whose request brought it.
    """

    tokens: list[int]
    sources: np.ndarray
    sampled: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperature: float | None
    turns: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The record of an agent's work on one sample.

    Attributes:
        rows: Token rows to train on. There is more than one if the prompt of a turn did not begin with the tokens of
            the turn before.
        turns: One dictionary per model call: messages, tools, tool_choice, the model's message and finish_reason, the
            index of its turn in `turn_rewards`, and the reward that the agent has given for it, if it has.
        turn_rewards: Reward that the agent has given for each turn, or 0. If a session has recorded the turns, they are
            those of the main conversation and its compactions. A model call of another conversation is a part of the
            turn before it.
        messages: The whole conversation, in OpenAI's form.
        tool_calls: Tool calls of the model, in order.
        tool_results: Results of the tool calls, in order.
        reward: (reward, its parts by name) if the agent set a reward itself. None otherwise.
        finish_reason: Why the last turn of the main conversation ended.
        conversations: Number of rows of each kind (main, subagent, compaction, auxiliary), with those that are not
            trained. Empty if the agent has returned its turns.
        requests: What the session of the sample has counted, such as turns that the agent edited.
    """

    rows: list[TokenRow]
    turns: list[dict[str, Any]]
    turn_rewards: list[float]
    messages: list[Message]
    tool_calls: list[dict[str, Any]]
    tool_results: list[dict[str, Any]]
    reward: tuple[float, dict[str, float]] | None = None
    finish_reason: str | None = None
    conversations: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the longest row. 0 without rows."""
        return max(map(len, self.rows), default=0)


@dataclass(slots=True)
class ProgramEnd:
    """How a program has ended, for reward functions.

    Attributes:
        exit_code: Its exit status, or -n if signal n ended it. None if it was ended for `ended_by`.
        output: What it has printed, without the middle if it is long.
        ended_by: "time", "memory", "processes" or "output" if it was ended for exceeding a limit, else "".
        before, after: Text of the files in the working folder, by path. Large files and files without text are left
            out.
    """

    exit_code: int | None
    output: str
    ended_by: str = ""
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RewardRecord:
    """The argument of a reward function: one completed sample.

    Attributes:
        prompt: Prompt of the row before the chat template, see PromptItem.
        solutions: Reference answers of the row. None if the row has none.
        record: The whole dataset row, column -> value.
        messages: The conversation up to the end of the sample.
        completion: All text of the assistant.
        final_answer: Text of the last assistant turn.
        rendered_completion: The trajectory after the first prompt as the chat template renders it, with special tokens,
            tool results and turn markers. For a single completion, its text with special tokens.
        tool_calls: Parsed tool calls.
        tool_results: Results of the tool calls.
        tokens, logprobs, loss_mask: One entry for each token of the response. loss_mask is True for trained tokens.
        prompt_tokens: Token ids of the prompt.
        step: Training step in which the sample was drawn, from 1. 0 before the first step.
        epoch: Epoch in which the sample was drawn, from 0.
        source: Name of the source of the prompt (train_dataset.sources). "" if there is only one.
        program: How the program of agent.command has ended. None for other agents.
        turn_rewards: Rewards that the agent has given for its turns. Empty if it has given none.
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
    step: int = 0
    epoch: int = 0
    source: str = ""
    program: ProgramEnd | None = None
    turn_rewards: list[float] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class RewardOutcome:
    """The result of scoring one sample.

    Attributes:
        value: The reward. None unless status is "ok".
        status: "ok", or why there is no reward. "timeout", "error": the reward function took too long or raised an
            exception. "not_finite": the reward is NaN, infinite, or too large for float32. "agent_error",
            "agent_timeout": the agent failed, so there is nothing to score. "agent_filtered": it failed because the
            context was full, or its budget of requests or tokens spent.
        message: Why there is no reward, in words. "" if there is a reward.
        parts: Unweighted components of the reward by name. Empty if the reward is a single number.
        key: The setting to look at if there is no reward.
    """

    value: float | None
    status: Literal["ok", "timeout", "error", "not_finite", "agent_error", "agent_timeout", "agent_filtered"] = "ok"
    message: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    key: str = "reward.fn"


@dataclass(slots=True, kw_only=True)
class TokenArrays:
    """A prompt and its completion as arrays of one entry per token.

    Attributes:
        tokens: Token ids, int64.
        logprobs: Log-probability of each sampled token, float64. 0.0 on the prompt.
        oldest_version: Lowest version of the weights that sampled a token of the completion. None if the completion has
            no tokens.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    oldest_version: int | None


@dataclass(slots=True, kw_only=True)
class ScoredSample:
    """One sample with its text and its reward.

    Attributes:
        item: The dataset row that was sampled.
        sequence: The completion. For an agent, all tokens that were sampled.
        completion: Text of the completion.
        outcome: The reward, or why there is none.
        group: Index of the sample's group, which holds all samples of one prompt.
        trajectory: The record of an agent. None for a single completion.
        advantages: Advantage of each token of the completion (for an agent, of each trained token). None until they are
            computed, and for samples that are not trained on.
        train_logprobs: Log-probability of each token of the completion from the training pass, before the update. None
            if it is not known.
        arrays: Prompt and completion as arrays, for the training row. None for an agent.
        teacher: Role of the sample's teacher, in a run with several teachers. Otherwise None.
        over_budget: Whether the agent has exceeded its budget of requests, tokens or seconds.
        spans: (name, start, end) of each phase of the sample so far, such as "decode", for the trace of the run. The
            times are those of areno.trace.
    """

    item: PromptItem
    sequence: RolloutSequence
    completion: str
    outcome: RewardOutcome
    group: int = 0
    trajectory: Trajectory | None = None
    advantages: np.ndarray | None = None
    train_logprobs: np.ndarray | None = None
    arrays: TokenArrays | None = None
    teacher: str | None = None
    over_budget: bool = False
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the sample was drawn to its end, so that it could be scored. False if its agent failed."""
        return not self.outcome.status.startswith("agent_")

    @property
    def n_tokens(self) -> int:
        """Number of tokens in prompt and completion. For an agent, in its longest row."""
        if self.trajectory is not None:
            return self.trajectory.n_tokens
        return len(self.item.tokens) + self.sequence.n_tokens
