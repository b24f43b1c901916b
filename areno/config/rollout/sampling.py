"""Settings of sampling. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areno.config.schema.fields import Section, build_check, forbid, setting
from areno.errors import Problem

LEAST_TEMPERATURE = 1e-5
"""Lower temperatures count as 0: logits divided by them would leave the range of float32."""
MOST_TEMPERATURE = 1e5
_MOST = 2**31 - 1


@dataclass(kw_only=True)
class SamplingConfig(Section):
    """How one completion is sampled: what `gconfig` and a script's `SamplingParams` have in common."""

    greedy: bool = setting(
        False,
        help="Always take the most likely token. In training only with an agent or n_samples=1, as the samples of a "
        "prompt would be equal otherwise",
        flag="--greedy",
    )
    top_p: float = setting(
        1.0, help="Sample from the most likely tokens with this total probability", gt=0, le=1, flag="--top-p"
    )
    top_k: int = setting(-1, help="Sample from the k most likely tokens. -1: from all", ge=-1, le=_MOST, flag="--top-k")
    max_new_tokens: int = setting(16, help="Longest completion in tokens", gt=0, flag="--max-new-tokens")
    min_new_tokens: int = setting(0, help="A completion does not end before it has this many tokens", ge=0)
    temperature: float = setting(
        1.0,
        help="Softmax temperature, in sampling and in training",
        ge=0,
        le=MOST_TEMPERATURE,
        flag="--temperature",
    )
    frequency_penalty: float = setting(
        0.0,
        help="Lower a token's logit by this for each time that the completion has it already. Not part of logprobs",
        ge=-2,
        le=2,
    )
    presence_penalty: float = setting(
        0.0,
        help="Lower a token's logit by this once the completion has it. Not part of logprobs",
        ge=-2,
        le=2,
    )
    min_p: float = setting(
        0.0,
        help="Sample only tokens that are at least this times as likely as the most likely one. Applied before top_k "
        "and top_p. 0: all",
        ge=0,
        le=1,
    )
    stop: list[str] | None = setting(None, help="Strings that end a completion")
    stop_token_ids: list[int] | None = setting(None, help="Token ids that end a completion, beside those of the model")
    ignore_eos: bool = setting(False, help="Continue to max_new_tokens after an end of sequence")
    skip_special_tokens: bool = setting(True, help="Leave special tokens out of the text that rewards and logs get")

    @property
    def is_greedy(self) -> bool:
        """Return whether each token is the most likely one. A temperature below LEAST_TEMPERATURE counts as 0."""
        return self.greedy or self.temperature < LEAST_TEMPERATURE

    @property
    def logprob_temperature(self) -> float:
        """Return the temperature of the log-probabilities, which is 1 where `temperature` counts as 0."""
        return 1.0 if self.temperature < LEAST_TEMPERATURE else self.temperature

    @forbid("min_new_tokens", "is {self.min_new_tokens}, more than max_new_tokens={self.max_new_tokens}; lower it")
    def shortest_above_longest(self) -> bool:
        return self.min_new_tokens > self.max_new_tokens

    @forbid("top_k", "is 0, which keeps no token; use -1 for all or a positive number")
    def no_token_to_sample(self) -> bool:
        return self.top_k == 0

    @forbid("stop", "contains an empty string, which would end every completion; leave it out")
    def empty_stop_string(self) -> bool:
        return "" in (self.stop or [])

    @forbid("stop_token_ids", "is {self.stop_token_ids}; token ids are at least 0")
    def negative_stop_token(self) -> bool:
        return min(self.stop_token_ids or [0]) < 0


@dataclass(kw_only=True)
class GenerationConfig(SamplingConfig):
    """How completions are sampled."""

    n_samples: int = setting(8, help="Completions per prompt", gt=0, le=1_000_000, flag="--n-samples")
    max_new_tokens: int = setting(3071, help="Longest completion in tokens", gt=0, flag="--max-new-tokens")
    max_tokens: int | None = setting(
        None,
        help="Longest prompt plus completion in tokens. null: the model's limit",
        gt=0,
        flag="--max-context-len",
    )
    # Training divides by the temperature, so it cannot be 0 in a run.
    temperature: float = setting(
        1.0,
        help="Softmax temperature, in sampling and in training",
        ge=LEAST_TEMPERATURE,
        le=MOST_TEMPERATURE,
        flag="--temperature",
    )

    @build_check  # a script may make a section greedy that has more settings
    def choice_of_greedy(self) -> Iterator[Problem]:
        for name in ("top_p", "top_k", "min_p"):
            if self.greedy and not self.is_default(name):
                yield Problem(name, f"is {vars(self)[name]}, but greedy takes the most likely token; set greedy=false")

    @forbid(
        "max_tokens",
        "is {self.max_tokens}, which leaves no room for a prompt beside max_new_tokens={self.max_new_tokens}",
    )
    def no_room_for_prompts(self) -> bool:
        return self.max_tokens is not None and self.max_tokens <= self.max_new_tokens
