"""Records that several packages share: prompts, requests, samples, rewards, rows to train on. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np

from areno.config.rollout import SamplingConfig
from areno.errors import did_you_mean
from areno.schema.fields import setting, settings
from areno.trace import Phases

FinishReason = Literal["stop", "length", "abort", "error"]


_DEFAULTS = SamplingConfig()


@dataclass(init=False)
class SamplingParams(SamplingConfig):
    """Settings for sampling completions. They are checked when a rollout receives them.

    Log-probabilities are those of softmax(logits / temperature), as in training. Penalties, top-k, top-p and min-p do
    not change them. The arguments up to max_prompt_len may be positional. All others are keyword arguments.

    Args:
        greedy: Whether to take the most likely token at each position. Log-probabilities still use `temperature`.
        top_p: In (0, 1]. Sample from the most likely tokens whose probabilities add up to this value.
        top_k: Sample from the k most likely tokens. -1 samples from all.
        max_new_tokens: Longest completion in tokens, without the prompt.
        max_context_len: Longest prompt plus completion in tokens. None takes the limit of the model.
        temperature: Divides the logits. Values below 1e-5 decode greedily, with log-probabilities at temperature 1.
        stop: Strings that end a completion. The completion includes the string.
        stop_token_ids: Token ids that end a completion, in addition to those of the model. The completion includes the
            token.
        ignore_eos: Whether to continue after an end-of-sequence token of the model.
        skip_special_tokens: Whether to leave special tokens out of decoded text. Only the training loops decode text.
        max_prompt_len: Longest prompt in tokens. Longer prompts are refused. None sets no limit.
        **more: `min_new_tokens` (no stop token is sampled before this many tokens), `frequency_penalty` (in [-2, 2],
            subtracted from a token's logit once for each earlier occurrence in the completion), `presence_penalty` (in
            [-2, 2], subtracted from a token's logit once if the completion contains the token) and `min_p` (in [0, 1],
            keeps the tokens with at least `min_p` times the probability of the most likely token, arXiv 2407.01082),
            and `top_logprobs` (number of most likely tokens to record for each sampled token, in
            RolloutSequence.top_tokens; a smaller vocabulary is recorded as a whole; decoding is slower).
    """

    max_context_len: int | None = setting(None, help="maximum number of tokens of prompt and completion together", gt=0)
    max_prompt_len: int | None = setting(None, help="maximum number of tokens of a prompt", gt=0)
    top_logprobs: int = setting(0, help="number of most likely tokens to record for each sampled token", ge=0)

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


TokenScores = list[tuple[int, float]]
"""(token id, log-probability) of the most likely tokens at one position, the most likely first."""

TOKEN_SCORE = [("token", "<i4"), ("logprob", "<f8")]
"""The numpy dtype of arrays of such pairs, whose `tolist()` has the pairs."""

Number = TypeVar("Number", int, float, TokenScores)


class Numbers(Generic[Number]):
    """A descriptor for a dataclass field that holds a list for each token. A stored array is converted on first read.

    Most arrays are never read as lists. `vars(record)[name]` returns the stored array or list without conversion.

    Args:
        default: Default of the dataclass field. None makes the field required.
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


@dataclass(slots=True, frozen=True)
class BegunCompletion:
    """The completion tokens that a sample has from an earlier rollout, which ended before the sample did.

    Attributes:
        tokens: Token ids, at least one.
        logprobs: Log-probability of each token.
        versions: For each token, version of the weights that sampled the token.
        top_logprobs: For each token, the most likely tokens, if the request wants them. Otherwise empty.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    top_logprobs: Sequence[TokenScores] | np.ndarray = field(default=(), compare=False)  # follow from the others


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be sampled `n_samples` times.

    The random number that draws a token depends only on (seed, sample number, position in the completion).

    Attributes:
        request_id: Id of the request, unique among unfinished requests.
        prompt: Token ids.
        n_samples: Number of completions to sample.
        params: Sampling settings.
        seed: Seed of the samples. The low 64 bits of any int are used. Requests should have different seeds.
        stream: Whether to return tokens as they are sampled. The first tokens of a stop string may then be returned
            before the stop string is recognised.
        pieces: Whether to return the new tokens of each sample every 64 decoding steps, so that the caller can process
            them while later tokens are sampled.
        grammar: Grammar for constrained decoding, see engine/decoder/grammar.py. A sample whose grammar becomes too
            complex ends with finish_reason "abort". None samples freely.
        logit_bias: Token id -> value to add to the logit of the token. Log-probabilities do not include it. It makes
            decoding slower.
        top_logprobs: Number of most likely tokens to return for each sampled token. More than 0 makes decoding slower.
            0 takes the number of `params`.
        prompt_logprobs: Whether to return log-probabilities of the prompt tokens too. The whole prompt is then
            computed, without the prefix cache, which is slower.
        raw_logprobs: Whether to return log-probabilities under softmax(logits), without the temperature, too.
            Log-probabilities of the most likely tokens and of the prompt are then returned only in this form. Decoding
            is slower.
        first_sample: Sample number of the first completion. More than 0 if the samples of one prompt are divided among
            several requests.
        expected_tokens: Expected length of a completion in tokens. An engine with several copies of the model divides
            requests among them by this length. None expects the longest possible completion.
        begun: Tokens of the completion from an earlier rollout. Sampling continues after them, with the random numbers
            that the sample would have had without the interruption. Only for a request of one sample. None starts a
            new completion.
        draft_scope: With rollout.speculation, requests with the same number share drafts, such as the turns of a
            conversation. An int64. None shares drafts with requests that have the same prompt.
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
    raw_logprobs: bool = False
    first_sample: int = 0
    expected_tokens: float | None = None
    begun: BegunCompletion | None = None
    draft_scope: int | None = None

    def __post_init__(self) -> None:
        self.top_logprobs = self.top_logprobs or self.params.top_logprobs

    @property
    def edits_logits(self) -> bool:
        """Whether sampling needs changes of the logits that the sampling kernel does not compute."""
        return bool(self.logit_bias) or self.params.edits_logits

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities are wanted that the sampling kernel does not compute."""
        return self.top_logprobs > 0 or self.raw_logprobs

    @property
    def scored_temperature(self) -> float:
        """Temperature of the log-probabilities of the most likely tokens and of the prompt."""
        return 1.0 if self.raw_logprobs else self.params.logprob_temperature

    def shares_prefill(self, other: GenerationRequest) -> bool:
        """Return whether one prefill serves both requests.

        That is so if the requests differ only in seed, number of samples, first_sample, expected_tokens and
        draft_scope.
        """
        if self.prompt != other.prompt:
            return False
        return self == replace(
            other,
            request_id=self.request_id,
            n_samples=self.n_samples,
            seed=self.seed,
            first_sample=self.first_sample,
            expected_tokens=self.expected_tokens,
            draft_scope=self.draft_scope,
        )


RETURNED = -1
"""The `sample` of an output by which a replica of the model returns a request that it has not started to sample."""


@dataclass(kw_only=True)
class GenerationOutput:
    """One finished sample of a request, or the next tokens of a streamed sample.

    Attributes:
        request_id: Id of the request.
        sample: Sample number within the request. RETURNED (-1): the replica returns a request that it has not started.
        tokens: Token ids of the completion, with the stop token if one was sampled. A partial output has only the
            tokens after the previous partial output. All other outputs have the whole completion so far. So has the
            output of a parked sample, whose rollout was stopped.
        logprobs: Log-probability of each token.
        versions: For each token, version of the weights that sampled it.
        finish_reason: Why the sample ended. None for a partial output, and for a parked sample. "error" if the model
            computed a logit that is NaN or infinite; the tokens sampled before are returned.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        top_logprobs: For each token, the `request.top_logprobs` most likely tokens. Empty if the request asked for
            none.
        prompt_logprobs: For each prompt token after the first, (log-probability, most likely tokens). Set in the first
            and the finished output of each sample, if the request asked for them.
        raw_logprobs: Log-probability of each token without the temperature. Empty unless requested.
        routes: With actor.routing_replay, the experts chosen for each token except the last: (tokens, layers with
            experts, experts per token), see RouteShape. Only a finished output has them.
        phases: In a run that is traced, (name, start) of each phase of a finished sample, see areno.trace.Phases.
    """

    request_id: int
    sample: int
    tokens: Numbers[int] = Numbers()
    logprobs: Numbers[float] = Numbers()
    versions: Numbers[int] = Numbers()
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    top_logprobs: Numbers[TokenScores] = Numbers(default=())
    prompt_logprobs: list[tuple[float, TokenScores]] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None
    phases: Phases = ()

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> GenerationOutput:
        """Make an output from a dictionary of all its fields, in less time than the constructor takes.

        Args:
            fields: Name -> value of each field, defaults included. The dictionary becomes the `__dict__` of the output.
        """
        made = cls.__new__(cls)
        made.__dict__ = fields
        return made


@dataclass
class TrainSequence:
    """One row to train on. Per-token lists and arrays cover `tokens` (prompt and response) and have its length.

    Attributes:
        prompt_mask: True for tokens that are not trained (prompt, tool results). Losses train on all other tokens.
        tokens: Token ids.
        logprobs: Log-probability of `tokens[t]` given `tokens[:t]`, from the rollout, under the policy that sampled
            the token. 0.0 on the prompt.
        old_logprobs: Log-probability of each token from the training pass, under the policy before its first update on
            this row. Importance ratios divide by these probabilities. `Trainer.train` sets the field for later calls.
            None, or NaN for a token, stands for the policy at the start of the call. Set it to None after changing
            tokens or temperature.
        advantages, returns, values, ref_logprobs: One value per token. None if the loss does not need them.
        teacher_logprobs: Log-probability of each token under a teacher, for the sampled form of distillation.
        teacher: Name of the role whose model is the teacher of this row. None stands for the role of the divergence
            (`Divergence.role`).
        teacher_prompt: Token ids that a teacher reads in place of the tokens before `response_start`. None if the
            teacher reads the same tokens.
        response_start: Index of the first token after the prompt that `teacher_prompt` replaces. None stands for the
            first trained token.
        teacher_top: (token ids, log-probabilities) of the J most likely tokens under a teacher that does not run in
            areno, or under the policy that sampled, each of shape (tokens of the row, J). As in `logprobs`, index t has
            the distribution of `tokens[t]` given `tokens[:t]`. An id of -1 stands for no token, where a list is
            shorter. Log-probabilities are at the temperature of training. Only indices of trained tokens are read.
        reward: Reward of the whole row.
        eos_token_id: For scripts that pad rows themselves. areno packs rows and does not read it.
        weights: Factor on the policy loss of each token, such as the importance weight of a stale sample. None is 1.
        kl_weights: Factor on the absolute log-ratio of each token, which is added to its policy loss. None is 0.
        staleness: Number of optimizer steps since the policy that sampled the row. 0 is on-policy.
        turns: For an agent, the turn of each token: its index in `turn_rewards`.
        turn_rewards: For an agent, the reward of each turn of the sample, which add up to `reward`.
        logit_gradients: For estimators of advantages that read it, a number for each token, see `TokenValue`.
        reward_parts: The parts of the reward of the sample by name, without weights, see `RewardOutcome`.
        routes: Experts that training uses for the first n tokens (routing replay): integers of shape (n, layers with
            experts, experts per token), as in RolloutSequence.routes. None lets the router choose.
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
    teacher_logprobs: list[float] | np.ndarray | None = None
    teacher: str | None = None
    teacher_prompt: list[int] | np.ndarray | None = None
    response_start: int | None = None
    teacher_top: tuple[Any, Any] | None = None
    turns: np.ndarray | None = None
    turn_rewards: np.ndarray | None = None
    reward_parts: Mapping[str, float] | None = None
    kl_weights: list[float] | np.ndarray | None = None
    logit_gradients: list[float] | np.ndarray | None = None

    def for_teacher(self) -> tuple[Any, int]:
        """Return the tokens that a teacher reads, and the index from which they are the tokens of this row.

        Returns:
            (tokens, first). The tokens end with `self.tokens[first:]`. Without a `teacher_prompt`, `first` is 0.
        """
        tokens = [] if self.tokens is None else self.tokens
        if self.teacher_prompt is None:
            return tokens, 0
        first = self.response_start
        if first is None:
            mask = [] if self.prompt_mask is None else list(self.prompt_mask)
            first = mask.index(False) if False in mask else len(tokens)
        return [*self.teacher_prompt, *tokens[first:]], first


TokenValue = Literal["logprob", "entropy", "logit_gradient"]
"""What a model says of a token, given those before it.

"logprob": its log-probability. "entropy": the entropy of its distribution q, in nats. "logit_gradient": the squared
norm of the gradient of the log-probability with respect to the logits, 1 - 2 q(token) + sum_v q_v^2.
"""

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
class ModelRole:
    """A model beside the policy, for Trainer.ensure_roles.

    Attributes:
        name: "ref" computes log-probabilities, "critic" a value per token, "reward" a score per row. Other names are
            free.
        path: Model folder or hub id.
        trainable: Whether the model is trained and gets an optimizer. Only models with a value head can be trained.
        optimizer_lr: Learning rate of a trainable model. None takes the learning rate of the policy.
    """

    name: str
    path: str
    trainable: bool
    optimizer_lr: float | None = None


@dataclass(kw_only=True)
class RolloutSequence:
    """One sampled completion.

    Attributes:
        resp_tokens: Token ids of the completion, with the stop token if one was sampled.
        resp_logprobs: Log-probability of each token when it was sampled.
        finish_reason: Why the completion ended.
        resp_versions: For each token, version of the weights that sampled it.
        routes: With actor.routing_replay, the experts chosen for each token of prompt and completion except the last:
            (tokens, layers with experts, experts per token), as TrainSequence.routes expects them. None otherwise.
        top_tokens, top_logprobs: With SamplingParams.top_logprobs = K, the K most likely tokens where each token was
            sampled, then the sampled token, as in TrainSequence.teacher_top: (tokens of the completion, K + 1). The
            last id is -1 if the sampled token is among the first K. None otherwise.
    """

    resp_tokens: Numbers[int] = Numbers()
    resp_logprobs: Numbers[float] = Numbers()
    finish_reason: FinishReason = "stop"
    resp_versions: Numbers[int] = Numbers(default=())
    routes: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the completion."""
        return len(vars(self)["resp_tokens"])


@dataclass(slots=True, kw_only=True)
class RolloutResult:
    """All samples of one prompt.

    Attributes:
        prompt_tokens: Token ids of the prompt.
        sequences: The sampled completions.
    """

    prompt_tokens: list[int]
    sequences: list[RolloutSequence]


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
