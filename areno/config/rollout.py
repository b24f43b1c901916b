"""Settings of sampling, of agents, and of the reward. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from numbers import Real
from types import MappingProxyType
from typing import Any

from areno.errors import ConfigError, Problem
from areno.reward_fns.built_in import BUILT_IN_REWARDS
from areno.schema.fields import Missing, Needs, Section, as_in, check, forbid, setting, settings, with_sections

LEAST_TEMPERATURE = 1e-5
"""Lower temperatures decode greedily, because logits divided by them would leave the range of float32."""
MOST_TEMPERATURE = 1e5
_MOST = 2**31 - 1
# A script may set greedy in a section that also has other sampling settings.
_DRAWING = Needs("greedy", False, so="the most likely token is taken", in_build=True)


def _edit(default: float, **declared: Any) -> Any:
    """Declare a setting that changes logits in a way that the sampling kernel does not compute; see `LogitEdits`."""
    field = setting(default, **declared)
    field.metadata = MappingProxyType({**field.metadata, "edits_logits": True})
    return field


@dataclass(kw_only=True)
class SamplingConfig(Section):
    """Settings for sampling one completion. `gconfig` and the `SamplingParams` of a script both inherit this class.

    Every sampling setting is declared here with its default and its bounds. Subclasses change only defaults and
    bounds.
    """

    greedy: bool = setting(
        False,
        help="Always take the most likely token. In training only with an agent or n_samples=1, as the samples of a "
        "prompt would be equal otherwise",
        flag="--greedy",
    )
    top_p: float = setting(
        1.0,
        help="Sample from the most likely tokens with this total probability",
        gt=0,
        le=1,
        only_with=_DRAWING,
        flag="--top-p",
    )
    top_k: int = setting(
        -1,
        help="Sample from the k most likely tokens. -1: from all",
        ge=-1,
        le=_MOST,
        only_with=_DRAWING,
        flag="--top-k",
    )
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
    presence_penalty: float = _edit(
        0.0,
        help="Lower a token's logit by this once the completion has it. Not part of logprobs",
        ge=-2,
        le=2,
    )
    min_p: float = _edit(
        0.0,
        help="Sample only tokens that are at least this times as likely as the most likely one. Applied before top_k "
        "and top_p. 0: all",
        ge=0,
        le=1,
        only_with=_DRAWING,
    )
    stop: list[str] | None = setting(None, help="Strings that end a completion")
    stop_token_ids: list[int] | None = setting(None, help="Token ids that end a completion, beside those of the model")
    ignore_eos: bool = setting(False, help="Continue to max_new_tokens after an end of sequence")
    skip_special_tokens: bool = setting(True, help="Leave special tokens out of the text that rewards and logs get")

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: `greedy` is set, or the temperature is below LEAST_TEMPERATURE."""
        return self.greedy or self.temperature < LEAST_TEMPERATURE

    @property
    def logprob_temperature(self) -> float:
        """Temperature at which log-probabilities are computed. 1 if `temperature` is below LEAST_TEMPERATURE."""
        return 1.0 if self.temperature < LEAST_TEMPERATURE else self.temperature

    @property
    def edits_logits(self) -> bool:
        """Whether sampling needs changes of the logits that the sampling kernel does not compute."""
        return any(vars(self)[name] != default for name, default in _edits())

    @forbid("min_new_tokens", "is {self.min_new_tokens}, more than max_new_tokens={self.max_new_tokens}; lower it")
    def shortest_above_longest(self) -> bool:
        """Return whether min_new_tokens exceeds max_new_tokens."""
        return self.min_new_tokens > self.max_new_tokens

    @forbid("top_k", "is 0, which keeps no token; use -1 for all or a positive number")
    def no_token_to_sample(self) -> bool:
        """Return whether top_k is 0, which keeps no token."""
        return self.top_k == 0

    @forbid("stop", "contains an empty string, which would end every completion; leave it out")
    def empty_stop_string(self) -> bool:
        """Return whether a stop string is empty."""
        return "" in (self.stop or [])

    @forbid("stop_token_ids", "is {self.stop_token_ids}; token ids are at least 0")
    def negative_stop_token(self) -> bool:
        """Return whether a stop token is negative."""
        return min(self.stop_token_ids or [0]) < 0


def flags_of_draws() -> dict[str, str]:
    """Return setting -> command-line flag for the settings that greedy decoding does not use."""
    known = settings(GenerationConfig)
    names = ["temperature", *(name for name, each in known.items() if _DRAWING in each.only_with)]
    return {name: known[name].flag for name in names if known[name].flag}


@cache
def _edits() -> list[tuple[str, Any]]:
    """Return (name, default) of each setting declared by `_edit`. With its default, a setting changes no logit."""
    declared = dataclasses.fields(SamplingConfig)
    return [(field.name, field.default) for field in declared if "edits_logits" in field.metadata]


def at_temperature(value: Any) -> SamplingConfig:
    """Return sampling settings with a given temperature, for rows that were sampled elsewhere.

    Args:
        value: The temperature that the logits were divided by.

    Returns:
        The settings. All other settings have their defaults.

    Raises:
        ConfigError: `value` is not a number from LEAST_TEMPERATURE to MOST_TEMPERATURE.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not LEAST_TEMPERATURE <= float(value) <= MOST_TEMPERATURE:
        expected = f"a number from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g} is expected"
        raise ConfigError(Problem("temperature", f"is {value!r}; {expected}"))
    return SamplingConfig(temperature=float(value))


@dataclass(kw_only=True)
class GenerationConfig(SamplingConfig):
    """Settings for sampling the completions of a prompt, in training or evaluation."""

    n_samples: int = setting(8, help="Completions per prompt", gt=0, le=1_000_000, flag="--n-samples")
    max_new_tokens: int = as_in(SamplingConfig, "max_new_tokens", default=3071)
    max_tokens: int | None = setting(
        None,
        help="Longest prompt plus completion in tokens. null: the model's limit",
        gt=0,
        flag="--max-context-len",
    )
    # Training divides by the temperature, so it cannot be 0 in a run.
    temperature: float = as_in(SamplingConfig, "temperature", ge=LEAST_TEMPERATURE)

    def unused_in_evaluation(self, section: str) -> Iterator[Problem]:
        """Yield a problem if a temperature is set for greedy evaluation, which does not use it.

        In training, the temperature of greedy samples still scales the logits.

        Args:
            section: Name of the section, "gconfig" or "eval_gconfig".
        """
        if self.greedy and not self.is_default("temperature"):
            text = f"is {self.temperature}, but {section}.greedy takes the most likely token; "
            yield Problem(f"{section}.temperature", f"{text}set {section}.greedy=false")

    @forbid(
        "max_tokens",
        "is {self.max_tokens}, which leaves no room for a prompt beside max_new_tokens={self.max_new_tokens}",
    )
    def no_room_for_prompts(self) -> bool:
        """Return whether max_new_tokens fills max_tokens (prompt plus completion), so that no prompt fits."""
        return self.max_tokens is not None and self.max_tokens <= self.max_new_tokens


VERIFIERS = "verifiers:"
"""Prefix of agent.fn if the agent is an environment of the verifiers package."""
_AGENT = Needs("fn", so="there is no agent", in_build=True)


@dataclass(kw_only=True)
class AgentConfig(Section):
    """An agent: user code that samples by requests to the policy's OpenAI-compatible endpoint."""

    fn: str | None = setting(
        None,
        help="Agent, as file.py[:function] (default: run_agent). It is called with (ctx, batch) and returns "
        "trajectories. verifiers:NAME is an installed environment of the verifiers package; it brings its data and its "
        "reward. null: each sample is a single completion",
        flag="--agent-fn",
    )
    timeout_s: float = setting(
        300.0,
        help="Time limit for the agent of one sample, and for each of its requests, in seconds",
        gt=0,
        le=86400,
        only_with=_AGENT,
        flag="--agent-timeout-s",
    )
    workers: int = setting(
        2, help="Number of processes that run agents. Each runs many at once", gt=0, le=512, only_with=_AGENT
    )
    train_tool_results: bool = setting(
        False, help="Also train the tokens of tool results", only_with=_AGENT, flag="--train-tool-results"
    )

    @property
    def is_environment(self) -> bool:
        """Whether the agent is an environment of the verifiers package."""
        return self.fn is not None and self.fn.startswith(VERIFIERS)


_SECTIONS = {
    name: (reward, f"The built-in reward {name}") for name, reward in BUILT_IN_REWARDS.items() if settings(reward)
}


_FUNCTION = Needs("fn", so="no function is called", in_build=True)


@dataclass(kw_only=True)
@with_sections(_SECTIONS)
class RewardConfig(Section):
    """The reward of a completion, from functions, from a reward model, or the sum of both.

    Each built-in reward that has settings has its own section, whose dataclass is in areno/reward_fns/built_in.py.
    """

    fn: str | list[str] | None = setting(
        None,
        help="Reward function: file.py[:function] (default: reward_fn) or a built-in one: "
        f"{', '.join(BUILT_IN_REWARDS)}. A list of several is their weighted sum, and each is a part with metrics of "
        "its own",
        flag="--reward-fn-path",
    )
    weights: list[float] | None = setting(
        None, help="Factors of the functions in the sum, one for each. null: 1 for all", only_with=_FUNCTION
    )
    path: str | None = setting(
        None,
        help="Reward model: folder or hub id of a ...ForSequenceClassification model with one label and the actor's "
        "tokenizer. Its score of the whole row is added to the result of fn",
        flag="--reward-ckpt",
    )
    offload: bool = setting(
        False,
        help="Keep the reward model in host memory while it is not in use (CUDA)",
        only_with=Needs("path", so="there is no reward model"),
    )
    timeout_s: float = setting(
        30.0,
        help="Time limit for scoring one sample by fn, in seconds. A sample that takes longer counts as a timeout",
        gt=0,
        le=86400,
        only_with=_FUNCTION,
    )
    workers: int | None = setting(
        None,
        help="Number of processes that call fn. null: as many as there are cores for (those the run may use, less one "
        "for the driver and one for each device), from 2 to 64",
        gt=0,
        le=512,
        only_with=_FUNCTION,
    )

    @property
    def functions(self) -> list[str]:
        """The reward functions that `fn` names, as a list. Empty if `fn` is null."""
        return [self.fn] if isinstance(self.fn, str) else self.fn or []

    def problems_of_none(self, by_agent: bool) -> Iterator[Problem]:
        """Yield a problem if neither a reward function nor a reward model is set, unless an agent gives the reward.

        Args:
            by_agent: Whether the run has an agent, which may give the reward.
        """
        if self.fn is None and self.path is None and not by_agent:
            text = "missing (file.py[:function] or the built-in math); or set reward.path to a reward model"
            yield Missing("reward.fn", text)

    @check
    def functions_and_weights(self) -> Iterator[Problem]:
        """Report an empty list of functions, or weights whose number differs from the number of functions."""
        if self.fn == []:
            yield Problem("fn", "is an empty list; name a function, or set it to null")
        elif self.fn is not None and self.weights is not None and len(self.weights) != len(self.functions):
            many = "1 function" if len(self.functions) == 1 else f"{len(self.functions)} functions"
            text = f"has {len(self.weights)} numbers for {many}; give one for each"
            yield Problem("weights", text)

    @check
    def settings_of_built_in_functions(self) -> Iterator[Problem]:
        """Report settings of a built-in reward that `fn` does not name."""
        for name in _SECTIONS:
            if name not in self.functions and not self.is_default(name):
                yield Problem(name, f"has settings, but reward.fn does not name {name}; leave them out")

    @check
    def built_in_functions_that_do_not_work(self) -> Iterator[Problem]:
        """Report the problems that each built-in reward named by `fn` finds in its own settings."""
        for name in (name for name in self.functions if name in _SECTIONS and name in vars(self)):
            yield from (problem.under(name) for problem in vars(self)[name].unusable(self.timeout_s))


@dataclass(kw_only=True)
class OnlyReward(Section):
    """The reward settings without a run, for commands that only score."""

    reward: RewardConfig = setting(factory=RewardConfig, help="Reward function", required_in_build=True)
