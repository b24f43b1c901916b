"""The plain records that cross borders: prompts, pairs, requests, samples, rewards, rows to train on. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np

from areno.config.rollout import SamplingConfig
from areno.errors import did_you_mean
from areno.schema.fields import setting, settings

FinishReason = Literal["stop", "length", "abort", "error"]


_DEFAULTS = SamplingConfig()


@dataclass(init=False)
class SamplingParams(SamplingConfig):
    """How completions are sampled. A plain record; the values are checked when a rollout is given it.

    Log-probabilities are those of softmax(logits / temperature), without penalties, top-k, top-p and min-p, as in
    training.

    Attributes:
        greedy: Take the most likely token. Its log-probability is at temperature 1 unless `temperature` is given.
        top_p: Sample from the most likely tokens of this total probability, in (0, 1].
        top_k: Sample from the k most likely tokens. -1 is all tokens.
        max_new_tokens: Longest completion in tokens.
        max_context_len: Longest prompt plus completion in tokens. None is the limit of the model.
        temperature: Number that the logits are divided by. A value below 1e-5 is greedy.
        stop: Strings that end a completion. They stay in it.
        stop_token_ids: Token ids that end a completion, in addition to the model's own. They stay in it.
        ignore_eos: Do not end a completion at the model's own end-of-sequence tokens.
        skip_special_tokens: Decode completions without special tokens. Rollouts return token ids and do not read it.
        max_prompt_len: Refuse prompts of more tokens. None refuses none.
        min_new_tokens: Sample no stop token before a completion has this many tokens. Keyword only, as all that follow.
        frequency_penalty: Lower a token's logit by this for each time that the completion has the token, in [-2, 2].
        presence_penalty: Lower a token's logit by this if the completion has the token, in [-2, 2].
        min_p: Sample from the tokens that are at least this times as likely as the most likely token (arXiv
            2407.01082), in [0, 1].
    """

    max_context_len: int | None = setting(None, help="longest prompt plus completion in tokens", gt=0)
    max_prompt_len: int | None = setting(None, help="longest prompt in tokens", gt=0)

    def __init__(
        self,
        greedy: bool = _DEFAULTS.greedy,
        top_p: float = _DEFAULTS.top_p,
        top_k: int = _DEFAULTS.top_k,
        max_new_tokens: int = _DEFAULTS.max_new_tokens,
        max_context_len: int | None = None,
        temperature: float = _DEFAULTS.temperature,
        stop: list[str] | None = _DEFAULTS.stop,
        stop_token_ids: list[int] | None = _DEFAULTS.stop_token_ids,
        ignore_eos: bool = _DEFAULTS.ignore_eos,
        skip_special_tokens: bool = _DEFAULTS.skip_special_tokens,
        max_prompt_len: int | None = None,
        **more: Any,
    ):
        # The arguments above are fixed, in this order. Every other field of the class is a keyword argument in `more`.
        known, given = settings(SamplingParams), {**locals(), **more}
        for name in more.keys() - known:
            raise TypeError(f"SamplingParams has no setting {name!r}{did_you_mean(name, known)}")
        vars(self).update({name: given[name] if name in given else known[name].default() for name in known})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (known := settings(SamplingParams)):
            raise AttributeError(f"SamplingParams has no setting {name!r}{did_you_mean(name, known)}")
        super().__setattr__(name, value)


# What help() shows: the fixed arguments, then the fields that are passed in `more`.
_FIXED = inspect.signature(SamplingParams).parameters
_MORE = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field_of.default())
    for name, field_of in settings(SamplingParams).items()
    if name not in _FIXED
]
SamplingParams.__signature__ = inspect.Signature([*list(_FIXED.values())[:-1], *_MORE])  # type: ignore[attr-defined]


Number = TypeVar("Number", int, float)


class Numbers(Generic[Number]):
    """A list of numbers as a field. An array that it is given becomes a list when it is read, since most never are.

    vars(record)[name] is what it was given, or that list.
    """

    def __init__(self, default: Any = None):
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, record: Any, owner: type | None = None) -> list[Number]:
        if record is None:  # dataclasses ask for a default
            if self._default is None:
                raise AttributeError(self._name)
            return self._default
        given = vars(record)[self._name]
        if not isinstance(given, list):
            given = vars(record)[self._name] = given.tolist() if hasattr(given, "tolist") else list(given)
        return given

    def __set__(self, record: Any, numbers: Any) -> None:
        vars(record)[self._name] = numbers


TokenScores = list[tuple[int, float]]
"""The most likely tokens at one place with their log-probabilities, the most likely first."""


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be sampled `n_samples` times.

    The random number of a token depends only on (seed, sample index, position in the completion). So the caller gives
    every request its own `seed` (any int; 64 bits are used).

    stream: return tokens as they come, as partial outputs. A partial output does not wait for stop strings: when a stop
    string is found, its first tokens may have been returned already. pieces: the same in few large pieces, for who has
    work to do with the tokens and would otherwise begin with it when the sample ends.

    grammar: only tokens that it allows are sampled, and the sample ends where nothing else is allowed. Its form is
    explained in engine/decoder/grammar.py. A sample whose grammar becomes too complex on the way ends with "abort".

    These take a slower path through the decoder: logit_bias (token id -> what is added to its logit; log-probabilities
    do not know of it), top_logprobs (so many most likely tokens are told for each token), and prompt_logprobs (those of
    the prompt are told, too; nothing of it is then taken from the cache).

    first_sample: number of its first sample. expected_tokens: that a sample is likely to get, by which an engine with
    several copies of the model divides the work; None: as many as it may get.
    """

    request_id: int
    prompt: list[int]
    n_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stream: bool = False
    pieces: bool = False
    grammar: str | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    first_sample: int = 0
    expected_tokens: float | None = None

    @property
    def edits_logits(self) -> bool:
        """Return whether its draws need more than the sampling kernel; see `LogitEdits`."""
        return bool(self.logit_bias) or self.params.edits_logits


GIVEN_BACK = -1
"""The `sample` of an output that says: this copy of the model has not begun the request, and does not have it now."""


@dataclass(kw_only=True)
class GenerationOutput:
    """One finished sample of a request, or the next tokens of a sample that is streamed.

    tokens: of the completion, without the prompt, with the stop token if one was sampled. logprobs: one for each token.
    versions: for each token, the version of the weights that sampled it. finish_reason: None marks a partial output,
    whose lists start after the partial output before. A finished output always has the whole completion.
    cached_tokens: of the prompt, whose keys and values were in the cache. top_logprobs: for each token, as many as the
    request wanted. prompt_logprobs: of a finished output, for each prompt token after the first, (log-probability, the
    most likely tokens). routes: of a finished output, where the engine keeps them: the experts of the prompt's and the
    completion's tokens but the last, which is never computed; see areno/engine/train/rows.py.
    A sample ends with the reason "error" where the model gave no finite numbers for it; its earlier tokens are there.
    """

    request_id: int
    sample: int
    tokens: Numbers[int] = Numbers()
    logprobs: Numbers[float] = Numbers()
    versions: Numbers[int] = Numbers()
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    top_logprobs: list[TokenScores] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, TokenScores]] = field(default_factory=list)
    routes: np.ndarray | None = None


@dataclass
class TrainSequence:
    """One row to train on. Lists and arrays are per token of `tokens` (prompt and response) and have its length.

    prompt_mask: True where the token is NOT trained (prompt, tool results); losses train on the False positions.
    logprobs: log-probability of `tokens[t]` given `tokens[:t]` under the policy that sampled it, as the rollout gives;
    0.0 on the prompt.
    old_logprobs: the same under the policy before its first update on this row, by the training pass: what importance
    ratios divide by. `Trainer.train` sets it, so that later calls on the row compare with the same policy. None, or NaN
    for a token: the policy as it is when training begins. Set it to None when you change tokens or temperature.
    advantages, returns, values, ref_logprobs: per token, None where the loss does not need them.
    reward: of the whole row. eos_token_id: for scripts that pad rows themselves; areno packs rows and does not read it.
    weights: factor on each token's policy loss, such as the importance weight of a stale sample; None is 1 everywhere.
    staleness: optimizer steps between the policy that sampled the row and the policy as it is; 0 is on-policy.
    routes: (n, layers, experts of a token) whole numbers: the experts of the first n tokens, which training then uses
    (RolloutSequence.routes). None where the router chooses.
    """

    prompt_mask: list[bool] | np.ndarray | None = None
    tokens: list[int] | np.ndarray | None = None
    logprobs: list[float] | np.ndarray | None = None
    advantages: list[float] | np.ndarray | None = None
    returns: list[float] | np.ndarray | None = None
    values: list[float] | np.ndarray | None = None
    ref_logprobs: list[float] | np.ndarray | None = None
    reward: float = 0.0
    eos_token_id: int = 0
    weights: list[float] | np.ndarray | None = None
    staleness: int = 0
    routes: np.ndarray | None = None
    old_logprobs: list[float] | np.ndarray | None = None


Message = dict[str, Any]
Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True)
class PromptItem:
    """One row of an RL dataset, ready to be sampled.

    prompt: the row's own text; for a row of messages, the text these render to.
    text: what the model reads, that is, `prompt` after the chat template; `tokens` are its ids.
    messages: the row's messages, None for a row of plain text. solutions: its reference answers, None if it has none.
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
        return max(list(self.chosen.tokens or []), list(self.rejected.tokens or []), key=len)


@dataclass(kw_only=True)
class Batch(Generic[Item]):
    """The rows of one step. skipped_long: too long rows passed over while this batch was filled.

    total_skipped_long: since the start of the run, this batch included. ends_epoch: it is the last batch of its epoch.
    """

    items: list[Item]
    skipped_long: int = 0
    total_skipped_long: int = 0
    epoch: int = 0
    ends_epoch: bool = False

    def __len__(self) -> int:
        return len(self.items)


PromptBatch = Batch[PromptItem]  # of one RL step


@dataclass(slots=True, kw_only=True)
class TokenRow:
    """Tokens that a model read and wrote one after another, as they were. Each field has one entry for each token.

    sources: where it comes from, uint8, see areno.server.tokens.Source. sampled: it was sampled in this row, bool.
    trained: by the loss mask, bool; other than sampled ones may be. logprobs: float64, 0.0 where it was not sampled.
    versions: int64, of the weights that sampled it. temperature: that all of its tokens were sampled at; None where
    they differ.
    """

    tokens: list[int]
    sources: np.ndarray
    sampled: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperature: float | None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """What an agent did for one sample. rows: more than one where the history of a turn was not that of the one before.

    turns: each with messages, tools, tool_choice, the model's message and its finish_reason, as plain values. messages:
    all of the conversation, in OpenAI's form. tool_calls, tool_results: in their order. reward: that the agent itself
    gave, with its parts by name; None if it gave none.
    """

    rows: list[TokenRow]
    turns: list[dict[str, Any]]
    messages: list[Message]
    tool_calls: list[dict[str, Any]]
    tool_results: list[dict[str, Any]]
    reward: tuple[float, dict[str, float]] | None = None

    @property
    def n_tokens(self) -> int:
        """Of the longest row."""
        return max(map(len, self.rows), default=0)


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


@dataclass(kw_only=True)
class RolloutSequence:
    """One sampled completion: its tokens, with the stop token.

    resp_logprobs, resp_versions: for each token, its log-probability and the weights' version when it was sampled.
    routes: with actor.routing_replay, the experts of the prompt's tokens and its own but the last, for TrainSequence.
    """

    resp_tokens: Numbers[int] = Numbers()
    resp_logprobs: Numbers[float] = Numbers()
    finish_reason: FinishReason = "stop"
    resp_versions: Numbers[int] = Numbers(default=())
    routes: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return len(vars(self)["resp_tokens"])


@dataclass(slots=True, kw_only=True)
class RolloutResult:
    """All samples of one prompt."""

    prompt_tokens: list[int]
    sequences: list[RolloutSequence]


@dataclass(slots=True, kw_only=True)
class RewardRecord:
    """What a reward function is given: one completed sample.

    prompt, messages, solutions, record: see PromptItem; `messages` goes on to the end of the sample.
    completion: all text of the assistant. final_answer: its last turn. rendered_completion: the trajectory behind the
    first prompt as the chat template renders it, with special tokens, tool results and the markers of turns; for a
    single completion, its text with special tokens. tool_calls, tool_results: parsed calls and their results.
    tokens, logprobs, loss_mask: of the response, one entry each; loss_mask is True where the token is trained.
    step, epoch: of the training, when the sample was drawn. The first step is 1, the first epoch 0; before the first
    step it is 0.
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


@dataclass(slots=True, frozen=True)
class RewardOutcome:
    """What came of scoring one sample. `value` is None unless status is "ok"; `message` then says why.

    not_finite: the reward is NaN, infinite, or too large for float32. agent_error, agent_timeout: there is nothing to
    score, since the agent failed. agent_filtered: its conversation filled the context. parts: the numbers that the
    value is made of, by name, without their weights; empty if it is one number.
    """

    value: float | None
    status: Literal["ok", "timeout", "error", "not_finite", "agent_error", "agent_timeout", "agent_filtered"] = "ok"
    message: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TokenArrays:
    """A prompt and its completion as arrays: token ids (int64), and log-probabilities (float64), 0.0 on the prompt.

    oldest_version: of the weights that sampled one of the tokens; None without tokens.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    oldest_version: int | None


@dataclass(slots=True, kw_only=True)
class ScoredSample:
    """One sample with its text and its reward. group: number of its group, the samples drawn of one prompt at once.

    trajectory: of an agent; `sequence` then has all tokens that were sampled in it. None for a single completion.
    advantages: of each token of the completion (of an agent: of its trained tokens), where it is trained on.
    train_logprobs: of each token of the completion, by the training pass under the policy before the update.
    arrays: of a single completion, what its row will hold.
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

    @property
    def is_done(self) -> bool:
        """Whether it was sampled to its end, so that it could be scored."""
        return not self.outcome.status.startswith("agent_")

    @property
    def n_tokens(self) -> int:
        """Prompt and completion; of an agent, the longest row."""
        if self.trajectory is not None:
            return self.trajectory.n_tokens
        return len(self.item.tokens) + self.sequence.n_tokens
