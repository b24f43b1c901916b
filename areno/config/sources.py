"""Settings of training prompts that come from several sources, each with its own share, agent, reward and limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from areno.config.datasets import ChangedTurns, DatasetConfig, section_name_problems
from areno.config.resuming import EXPLICIT
from areno.errors import Problem
from areno.schema.fields import Needs, Section, check, require, setting


def source_key(name: str) -> str:
    """Return the configuration section of a source, for messages."""
    return f"train_dataset.sources.{name}"


def agent_key(source: str) -> str:
    """Return the setting that names the agent of a source. "" is the only source."""
    return f"{source_key(source)}.agent" if source else "agent.fn"


@dataclass(kw_only=True)
class SourceConfig(DatasetConfig):
    """One of several sources of training prompts."""

    batch_size: ClassVar[None] = None  # type: ignore[misc]
    drop_last: ClassVar[bool] = False  # type: ignore[misc]
    changed_turns: ClassVar[ChangedTurns] = "split"  # type: ignore[misc]
    weight: float = setting(
        1.0,
        help="Share of this source in the prompts, relative to other weights. It holds over many steps, even if a "
        "batch has fewer prompts than there are sources",
        ge=0,
    )
    final_weight: float | None = setting(
        None,
        help="Weight after curriculum.schedule_steps steps, reached in a straight line. null: the weight stays",
        ge=0,
    )
    agent: str | None = setting(
        None, help="Agent of this source, as agent.fn. null: that of agent.fn or, if null, a single completion"
    )
    reward: str | list[str] | None = setting(
        None,
        help="Reward function of this source, or several that are added, as reward.fn. null: that of the environment "
        "in path if it gives one, else reward.fn",
    )
    n_samples: int | None = setting(
        None, help="Number of samples of each prompt, at most gconfig.n_samples. null: gconfig.n_samples", gt=0
    )
    max_new_tokens: int | None = setting(
        None,
        help="Largest number of tokens of a completion, at most gconfig.max_new_tokens. null: gconfig.max_new_tokens",
        gt=0,
    )
    timeout_s: float | None = setting(
        None, help="Time limit of an agent in seconds, as agent.timeout_s. null: agent.timeout_s", gt=0, le=86400
    )
    max_requests: int | None = setting(
        None,
        help="Largest number of requests of an agent, as agent.max_requests. null: agent.max_requests",
        gt=0,
        le=1_000_000,
    )

    @property
    def last_weight(self) -> float:
        """The weight at the end of its schedule."""
        return self.weight if self.final_weight is None else self.final_weight

    @property
    def reward_names(self) -> list[str]:
        """The reward functions of this source, as a list. Empty if `reward` is null."""
        return [self.reward] if isinstance(self.reward, str) else self.reward or []


_BANDIT = Needs("type", "bandit", so="weights do not depend on advantages")
_REST = Needs("rest_epochs", so="no prompt rests")


@dataclass(kw_only=True)
class CurriculumConfig(Section):
    """How the weights of sources change, and which prompts rest for a while."""

    type: Literal["fixed", "bandit"] = setting(
        "fixed",
        help="Weights of sources. fixed: those of the sources, and their schedule. bandit: these times exp(Q / "
        "temperature), with Q the moving average of the absolute advantages of a source's samples (arXiv 2505.14970), "
        "so that sources which are solved sometimes get more prompts",
    )
    learning_rate: float = setting(
        0.5, help="Share of a step's mean absolute advantage in the new Q of a source", gt=0, le=1, only_with=_BANDIT
    )
    temperature: float = setting(
        1.0, help="Temperature of the bandit. The lower it is, the more the weights differ", gt=0, only_with=_BANDIT
    )
    schedule_steps: int = setting(
        1000, help="Number of batches after which the weights of sources are their final_weight", gt=0
    )
    rest_epochs: int = setting(
        0,
        help="Epochs of its source in which a prompt is left out after a mean reward of at least solved or at most "
        "hopeless. 0: no prompt rests",
        ge=0,
    )
    solved: float = setting(1.0, help="Mean reward of a prompt from which it rests as solved", only_with=_REST)
    hopeless: float = setting(0.0, help="Mean reward of a prompt up to which it rests as hopeless", only_with=_REST)

    @require("hopeless", "is {self.hopeless}, but solved is {self.solved}; it must be less")
    def hopeless_is_below_solved(self) -> bool:
        return self.hopeless < self.solved


@dataclass(kw_only=True)
class PromptDatasetConfig(DatasetConfig):
    """The source of training prompts, or several named sources, and how many prompts a step uses."""

    sources: dict[str, SourceConfig] | None = setting(
        None,
        help="Several sources: name -> settings. A source takes each key about rows (path, loader, columns, "
        "dataset_kwargs, split, shuffle, max_length) that it leaves out from train_dataset. null: one source, "
        "train_dataset itself",
        on_resume=EXPLICIT,
    )
    curriculum: CurriculumConfig = setting(
        factory=CurriculumConfig,
        help="How the weights of sources change, and which prompts rest",
        only_with=Needs("sources", so="there is one source; give it a name in sources"),
        on_resume=EXPLICIT,
    )

    @property
    def has_source(self) -> bool:
        """Whether a source of rows is set, or several."""
        return super().has_source or self.sources is not None

    @property
    def max_length_or_unlimited(self) -> int:
        """The largest max_length of the sources, or a very large number if one is null."""
        return max(each.max_length or sys.maxsize for each in self.by_name().values())

    @property
    def reward_by_source(self) -> dict[str, str | list[str] | None]:
        """Name -> setting `reward` of each of several sources."""
        return {name: source.reward for name, source in (self.sources or {}).items()}

    def by_name(self) -> dict[str, DatasetConfig]:
        """Return name -> settings of each source. A single source has the name ""."""
        return {"": self} if self.sources is None else dict(self.sources)

    @check
    def check_schedule(self) -> Iterator[Problem]:
        """Report schedule_steps without a source whose weight changes."""
        changes = any(each.final_weight is not None for each in (self.sources or {}).values())
        if self.sources is not None and not changes and not self.curriculum.is_default("schedule_steps"):
            text = "is {}, but no source has a final_weight; leave it out"
            yield Problem("curriculum.schedule_steps", text, self.curriculum.schedule_steps)

    @check
    def check_source_names(self) -> Iterator[Problem]:
        """Report names of sources that cannot be parts of the names of metrics, and weights that are all 0."""
        if self.sources is not None:
            yield from (Problem("sources", text) for text in section_name_problems(self.sources))
            if self.sources and not any(each.weight for each in self.sources.values()):
                yield Problem("sources", "all have weight 0; give one of them more")
            elif self.sources and not any(each.last_weight for each in self.sources.values()):
                yield Problem("sources", "all have weight 0 at the end of their schedule; give one of them more")
