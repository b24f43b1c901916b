"""Settings of the reward: functions, a reward model and a judge. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.judge import JudgeConfig
from areno.config.resuming import FROM_HERE, SPEED
from areno.errors import Problem
from areno.reward_fns.built_in import BUILT_IN_REWARDS
from areno.schema.fields import MissingSetting, Needs, Section, check, setting, settings, source_check, with_sections

_SECTIONS = {
    name: (reward, f"Settings of the reward function {name}, if reward.fn names it")
    for name, reward in BUILT_IN_REWARDS.items()
    if settings(reward)
}

StepScore = Literal["min", "mean", "last", "prod"]
_FUNCTION = Needs("fn", so="no function is called", is_source=True)
_MODEL = Needs("path", so="there is no reward model")


@dataclass(kw_only=True)
@with_sections(_SECTIONS)
class RewardConfig(Section):
    """The reward of a completion: the sum of the rewards of functions, a reward model and a judge.

    Each built-in reward that has settings has its own section, whose dataclass is in areno/reward_fns/built_in.py.
    """

    heading = "Rollout"
    fn: str | list[str] | None = setting(
        None,
        help="Reward function: file.py[:function] (default: reward_fn), or a built-in one: "
        f"{', '.join(BUILT_IN_REWARDS)}. SCHEME:NAME is the reward of an environment. A list of several functions "
        "gives their weighted sum, and each function has its own metrics",
        flag="--reward-fn-path",
    )
    weights: list[float] | None = setting(
        None, help="Weights of the reward functions in their sum. null: all 1", only_with=_FUNCTION
    )
    path: str | None = setting(
        None,
        help="Reward model: folder or hub id of a ...ForSequenceClassification model with one label, or of a process "
        "reward model (...ForTokenClassification, two labels), with the actor's tokenizer. Its score is added to the "
        "reward of reward.fn. null: none",
        flag="--reward-ckpt",
    )
    step_separator: str | None = setting(
        None,
        help="Text at which a process reward model's completions are cut into steps. null: that of config.json of "
        "reward.path, which the recipe prm writes",
        may_be_blank=True,
        only_with=_MODEL,
    )
    step_score: StepScore = setting(
        "min",
        help="How a process reward model's scores of steps, the probabilities that each is right, become one: the "
        "smallest, their mean, the last, or their product",
        only_with=_MODEL,
    )
    offload: bool = setting(
        False, help="Keep the reward model in host memory while unused (CUDA)", only_with=_MODEL, on_resume=SPEED
    )
    judge: JudgeConfig = setting(
        factory=JudgeConfig, help="Language model that reads completions, whose score is added to the reward"
    )
    timeout_s: float = setting(
        30.0,
        help="Time limit in seconds for fn to score one sample. Beyond it, the sample has no reward",
        gt=0,
        le=86400,
        on_resume=FROM_HERE,
    )
    workers: int | None = setting(
        None,
        help="Number of processes that call fn. null: the available CPU cores less one for the driver and one per "
        "device, at least 2 and at most 64",
        gt=0,
        le=512,
        on_resume=SPEED,
    )

    @property
    def function_names(self) -> list[str]:
        """The reward functions that `fn` names, as a list. Empty if `fn` is null."""
        return [self.fn] if isinstance(self.fn, str) else self.fn or []

    @property
    def has_model(self) -> bool:
        """Whether a model gives a reward: a reward model or a judge."""
        return self.path is not None or self.judge.is_set

    def missing_reward_problems(self, by_agent: bool) -> Iterator[Problem]:
        """Yield a problem if no reward function, reward model or judge is set, unless an agent gives the reward.

        Args:
            by_agent: Whether the run has an agent, which may give the reward.
        """
        if self.fn is None and not self.has_model and not by_agent:
            text = "missing (file.py[:function] or the built-in math); or set reward.path to a reward model, or "
            text += "reward.judge.path to a model that reads"
            yield MissingSetting("reward.fn", text)

    def idle_process_problems(self) -> list[Problem]:
        """Return the problems of settings of reward processes if `fn` is null, for an enclosing section."""
        names = [name for name in ("timeout_s", "workers") if self.fn is None and not self.is_default(name)]
        need = Needs("reward.fn", so="no function is called")
        return [need.problem(f"reward.{name}", vars(self)[name], None) for name in names]

    @check
    def check_functions_and_weights(self) -> Iterator[Problem]:
        """Report an empty list of functions, or weights whose number differs from the number of functions."""
        if self.fn == []:
            yield Problem("fn", "is an empty list; name a function, or set it to null")
        elif self.fn is not None and self.weights is not None and len(self.weights) != len(self.function_names):
            many = "1 function" if len(self.function_names) == 1 else f"{len(self.function_names)} functions"
            text = f"has {len(self.weights)} numbers for {many}; give one for each"
            yield Problem("weights", text)

    @check
    def check_built_in_settings(self) -> Iterator[Problem]:
        """Report settings of a built-in reward that `fn` does not name."""
        for name in _SECTIONS:
            if name not in self.function_names and not self.is_default(name):
                yield Problem(name, f"has settings, but reward.fn does not name {name}; leave them out")

    @check
    def check_built_in_functions(self) -> Iterator[Problem]:
        """Report the problems that each built-in reward named by `fn` finds in its own settings."""
        for name in (name for name in self.function_names if name in _SECTIONS and name in vars(self)):
            yield from (problem.under(name) for problem in vars(self)[name].find_problems(self.timeout_s))


@dataclass(kw_only=True)
class RewardOnlyConfig(Section):
    """The section `reward` alone, for commands that score completions outside of a run."""

    reward: RewardConfig = setting(factory=RewardConfig, help="Reward function", required_in_build=True)

    @source_check
    def check_processes(self) -> Iterator[Problem]:
        """Report settings of reward processes without a function."""
        yield from self.reward.idle_process_problems()
