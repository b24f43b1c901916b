"""Settings of the reward: functions, those that are built in, and a reward model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from areno.config.schema.fields import Missing, Section, build_check, check, forbid, setting
from areno.errors import Problem

BUILT_IN_REWARDS = ("math", "exact_match", "choice", "format", "length", "json", "code")

# A reasoning that is closed once, and an answer behind it. Many chat templates write the opening tag themselves.
_NO_TAG = r"(?!</?think>)"
THINK = rf"\s*(?:<think>)?(?:{_NO_TAG}.)*</think>\s*{_NO_TAG}\S(?:{_NO_TAG}.)*"


@dataclass(kw_only=True)
class FormatRewardConfig(Section):
    """The built-in reward format: 1 if the whole completion has a form, else 0."""

    pattern: str = setting(
        THINK,
        help="Regular expression (Python, dot matches newlines) that the whole completion has to match. The default is "
        "<think>...</think> and an answer; the opening tag may be missing",
    )

    @check
    def pattern_compiles(self) -> Iterator[Problem]:
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield Problem("pattern", f"is {self.pattern!r}, which is no regular expression: {error}")


@dataclass(kw_only=True)
class LengthRewardConfig(Section):
    """The built-in reward length: 1 between two lengths, and less the farther a completion is from them."""

    min_tokens: int | None = setting(None, help="Shortest completion that gets 1. null: 0", gt=0)
    max_tokens: int | None = setting(None, help="Longest completion that gets 1. null: no limit", gt=0)
    margin_tokens: int = setting(
        0, help="Outside of the limits the reward falls evenly, to 0 at so many tokens. 0: at once", ge=0
    )

    @forbid("min_tokens", "is {self.min_tokens}, more than max_tokens={self.max_tokens}")
    def limits_cross(self) -> bool:
        return self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens


@dataclass(kw_only=True)
class JsonRewardConfig(Section):
    """The built-in reward json: 1 if the answer is JSON of a schema, else 0."""

    schema: str | None = setting(
        None,
        help="File with the JSON schema of rows that have no field schema (needs the package jsonschema). null: any "
        "JSON",
    )


@dataclass(kw_only=True)
class CodeRewardConfig(Section):
    """The built-in reward code: 1 if the program in the completion passes the tests of its row, else 0. Linux only."""

    timeout_s: float = setting(10.0, help="Time limit for all tests of a sample, in seconds", gt=0, le=3600)
    memory_mb: int = setting(1024, help="Memory that each process of the program may use, in MiB", ge=64)
    partial: bool = setting(False, help="The reward is the share of tests that pass")


@dataclass(kw_only=True)
class RewardConfig(Section):
    """The reward of a completion, from functions, a reward model, or both (their sum)."""

    fn: str | list[str] | None = setting(
        None,
        help="Reward function: file.py[:function] (default: reward_fn) or a built-in one: "
        f"{', '.join(BUILT_IN_REWARDS)}. A list of several is their weighted sum, and each is a part with metrics of "
        "its own",
        flag="--reward-fn-path",
    )
    weights: list[float] | None = setting(
        None, help="Factors of the functions in the sum, one for each. null: 1 for all"
    )
    path: str | None = setting(
        None,
        help="Reward model: folder or hub id of a ...ForSequenceClassification model with one label and the actor's "
        "tokenizer. Its score of the whole row is added to the result of fn",
        flag="--reward-ckpt",
    )
    offload: bool = setting(False, help="Keep the reward model in host memory while it is not in use (CUDA)")
    timeout_s: float = setting(
        30.0,
        help="Time limit for scoring one sample by fn, in seconds. A sample that takes longer counts as a timeout",
        gt=0,
        le=86400,
    )
    workers: int | None = setting(
        None,
        help="Number of processes that call fn. null: as many as there are cores for (those the run may use, less one "
        "for the driver and one for each device), from 2 to 64",
        gt=0,
        le=512,
    )
    format: FormatRewardConfig = setting(factory=FormatRewardConfig, help="The built-in reward format")
    length: LengthRewardConfig = setting(factory=LengthRewardConfig, help="The built-in reward length")
    json: JsonRewardConfig = setting(factory=JsonRewardConfig, help="The built-in reward json")
    code: CodeRewardConfig = setting(factory=CodeRewardConfig, help="The built-in reward code")

    @property
    def functions(self) -> list[str]:
        """The functions of fn."""
        return [self.fn] if isinstance(self.fn, str) else self.fn or []

    def problems_of_none(self, by_agent: bool) -> Iterator[Problem]:
        """What is wrong where neither a function nor a model is set. by_agent: an agent brings the reward."""
        if self.fn is not None or self.path is not None:
            return
        if not by_agent:
            text = "missing (file.py[:function] or the built-in math); or set reward.path to a reward model"
            yield Missing("reward.fn", text)
            return
        for name in (name for name in ("weights", "timeout_s", "workers") if not self.is_default(name)):
            text = f"is {vars(self)[name]}, but reward.fn is null and the agent brings its reward; leave it out"
            yield Problem(f"reward.{name}", text)

    @check
    def functions_and_weights(self) -> Iterator[Problem]:
        if self.fn == []:
            yield Problem("fn", "is an empty list; name a function, or set it to null")
        elif self.fn is not None and self.weights is not None and len(self.weights) != len(self.functions):
            many = "1 function" if len(self.functions) == 1 else f"{len(self.functions)} functions"
            text = f"has {len(self.weights)} numbers for {many}; give one for each"
            yield Problem("weights", text)

    @check
    def settings_of_built_in_functions(self) -> Iterator[Problem]:
        for name in ("format", "length", "json", "code"):
            if name not in self.functions and not self.is_default(name):
                yield Problem(name, f"has settings, but reward.fn does not name {name}; leave them out")

    @forbid("length", "is in reward.fn, but has no limit; set reward.length.max_tokens or reward.length.min_tokens")
    def length_without_a_limit(self) -> bool:
        return "length" in self.functions and self.length.min_tokens is None and self.length.max_tokens is None

    @forbid(
        "code.timeout_s",
        "is {self.code.timeout_s}, which has to be less than reward.timeout_s={self.timeout_s}, the limit for scoring "
        "a sample",
    )
    def code_takes_longer_than_scoring(self) -> bool:
        return "code" in self.functions and self.code.timeout_s >= self.timeout_s

    @build_check
    def limits_of_no_function(self) -> Iterator[Problem]:
        for name in ("weights", "timeout_s", "workers"):
            if self.fn is None and self.path is not None and not self.is_default(name):
                yield Problem(name, f"is {vars(self)[name]}, but fn is null, so no function is called; leave it out")

    @forbid("offload", "is true, but reward.path is null, so there is no reward model")
    def nothing_to_offload(self) -> bool:
        return self.offload and self.path is None


@dataclass(kw_only=True)
class OnlyReward(Section):
    """The reward without a run, for commands that only score."""

    reward: RewardConfig = setting(factory=RewardConfig, help="Reward function", required_in_build=True)
