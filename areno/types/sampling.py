"""What is asked of the sampler, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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
        """Return whether one prefill serves both requests: the fields below may differ."""
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
