"""The agents of a run and of its sources, with their checks, for the configuration of policies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from areno.config.agent import COMMAND, COMPLETION, ONLINE, AgentConfig, TurnCredit
from areno.config.datasets import MISSING_ROWS
from areno.config.models import PolicyConfig
from areno.config.reward import RewardConfig
from areno.config.rollout import GenerationConfig, RolloutConfig
from areno.config.sources import PromptDatasetConfig, SourceConfig, source_key
from areno.environments.packages import package_of
from areno.errors import Key, Problem
from areno.schema.fields import MissingSetting, check, require, source_check


class WithAgents:
    """Adds to PolicyExperimentConfig the settings of each source (train_dataset.sources), and checks of agents."""

    if TYPE_CHECKING:
        train_dataset: PromptDatasetConfig
        agent: AgentConfig
        gconfig: GenerationConfig
        rollout: RolloutConfig
        reward: RewardConfig
        actor: PolicyConfig

        trained_samples_per_prompt: int

        def group_norm_keys(self) -> list[str]: ...  # noqa: D102
        def rows_per_item(self) -> int: ...  # noqa: D102

        other_credits: ClassVar[str]

        @property
        def turn_credits(self) -> Sequence[TurnCredit]: ...  # noqa: D102

    @check
    def check_turn_credit(self) -> Iterator[Problem]:
        """Report a credit of turns that does not fit the algorithm, or the normalisation of its rewards."""
        credit, norm = self.agent.turn_credit, self.actor.adv_norm
        if credit not in self.turn_credits:
            known = " or ".join(self.turn_credits)
            yield Problem("agent.turn_credit", "is {}; here it can be {}{}", credit, known, self.other_credits)
        elif credit != "outcome" and self.actor.reward_norm is not None:
            text = "normalises the rewards of whole samples, and {} is {}; set it to null"
            yield Problem("actor.reward_norm", text, Key("agent.turn_credit"), credit)
        elif credit != "outcome" and self.actor.kl_reward_coef:
            text = "is true, but the KL is a reward of tokens and {} is {}; set it to false"
            yield Problem("actor.use_kl_in_reward", text, Key("agent.turn_credit"), credit)
        elif credit == "turn_baseline" and (norm is None or norm.mean_level != "group"):
            text = "is {}, but the baseline of {}=turn_baseline is the mean of a group; set it to group"
            level = "null" if norm is None or norm.mean_level is None else norm.mean_level
            yield Problem("actor.adv_norm.mean_level", text, level, Key("agent.turn_credit"))

    def agent_of(self, source: str) -> AgentConfig:
        """Return the settings of the agent of a source of training prompts. "" is the only source."""
        of_source = self._source(source)
        if of_source is None:
            return self.agent
        given = {name: vars(of_source)[name] for name in ("timeout_s", "max_requests")}
        changed = {name: value for name, value in given.items() if value is not None}
        if of_source.agent is not None and of_source.agent != self.agent.fn:
            changed |= {"fn": of_source.agent, "command": None} if self.agent.fn == COMMAND else {"fn": of_source.agent}
        return replace(self.agent, **changed)

    def gconfig_of(self, source: str, among: GenerationConfig | None = None) -> GenerationConfig:
        """Return the sampling settings of a source of prompts. "" is the only source.

        `among` are the settings of all sources, gconfig by default. Those of an evaluation hold as they are.
        """
        of_source = self._source(source)
        if of_source is None or (among is not None and among is not self.gconfig):
            return among or self.gconfig
        given = {name: vars(of_source)[name] for name in ("n_samples", "max_new_tokens")}
        return replace(self.gconfig, **{name: value for name, value in given.items() if value is not None})

    def n_samples_of(self, source: str, among: GenerationConfig | None = None) -> int:
        """Return the number of samples of a prompt of a source, as in `gconfig_of`."""
        own = self._source(source) if among is None or among is self.gconfig else None
        return (own.n_samples if own is not None else None) or (among or self.gconfig).n_samples

    def _source(self, name: str) -> SourceConfig | None:
        return (self.train_dataset.sources or {}).get(name)

    @source_check
    def check_tasks_have_agents(self) -> Iterator[Problem]:
        """Report rows that are for an agent or a program, without one."""
        sources = self.train_dataset.sources
        paths = {"": self.train_dataset.path} if sources is None else {name: of.path for name, of in sources.items()}
        for name, path in paths.items():
            environment = package_of(path)
            if environment is not None and environment.needs_agent and self.agent_of(name).fn in (None, COMPLETION):
                key = f"{source_key(name)}.agent" if name else "agent.command"
                text = f"missing; {path} has tasks for a program: set it, such as by agent=claude_code, or set agent.fn"
                yield MissingSetting(key, text)

    @check
    def check_sources(self) -> Iterator[Problem]:
        """Report sources with more samples or longer completions than gconfig allows, or groups of one sample."""
        for name, source in (self.train_dataset.sources or {}).items():
            for key in ("n_samples", "max_new_tokens"):
                # A value that is wrong itself is absent.
                value, most = vars(source).get(key), vars(self.gconfig).get(key, sys.maxsize)
                if (value or 0) > most:
                    text = "is {}, more than {}={}; raise that, or lower this"
                    yield Problem(f"{source_key(name)}.{key}", text, value, Key(f"gconfig.{key}"), most)
            if (source.agent or self.agent.fn) in (None, COMPLETION, ONLINE):
                for key in ("timeout_s", "max_requests")[: 1 if self.agent.fn == ONLINE else 2]:
                    if vars(source).get(key) is not None:
                        text = "is {}, but this source has no agent that is run here; leave it out"
                        yield Problem(f"{source_key(name)}.{key}", text, vars(source)[key])
            if source.n_samples == 1 and (self.group_norm_keys() or self.rollout.dynamic_sampling):
                text = "is 1; a group advantage needs at least 2 samples per prompt"
                yield Problem(f"{source_key(name)}.n_samples", text)
            if source.agent in (COMMAND, ONLINE) and source.agent != self.agent.fn:
                key = Key("agent.command" if source.agent == COMMAND else "agent.mode")
                yield Problem(f"{source_key(name)}.agent", "is {}, but {} is not set; set that", source.agent, key)
            if self.rows_per_item() > 1 and (source.n_samples or sys.maxsize) < self.trained_samples_per_prompt:
                text = "is {}, but the pairs of a prompt need {} samples; raise this, or lower {}"
                args = source.n_samples, self.trained_samples_per_prompt, Key("pairs_per_prompt")
                yield Problem(f"{source_key(name)}.n_samples", text, *args)
            if source.n_samples == 1 and self.reward.judge.compare:
                text = "is 1, but {} compares the samples of a prompt; sample several"
                yield Problem(f"{source_key(name)}.n_samples", text, Key("reward.judge.compare"))
            overlong = self.actor.overlong_tokens or 0
            if source.max_new_tokens is not None and source.max_new_tokens < overlong <= self.gconfig.max_new_tokens:
                text = "is {}, less than {}={}; raise this, or lower that"
                args = source.max_new_tokens, Key("actor.overlong_tokens"), overlong
                yield Problem(f"{source_key(name)}.max_new_tokens", text, *args)

    @require(
        "agent.whole_batch",
        "is true, but the agents of several sources (train_dataset.sources) get one sample at a time; set it to false",
    )
    def whole_batches_have_one_source(self) -> bool:
        return not self.agent.whole_batch or not self.train_dataset.sources

    @source_check
    def check_reward_processes(self) -> Iterator[Problem]:
        """Report settings of reward processes of a run that calls no reward function."""
        yield from self.idle_reward_problems()

    def idle_reward_problems(self) -> list[Problem]:
        """Return the problems of settings of reward processes if neither the run nor a source names a function."""
        sources = self.train_dataset.sources or {}
        return [] if any(each.reward for each in sources.values()) else self.reward.idle_process_problems()

    @require("agent.mode", "is online, but sources (train_dataset.sources) name agents of their own; leave these out")
    def external_agents_have_no_others(self) -> bool:
        sources = self.train_dataset.sources or {}
        return self.agent.mode != "online" or not any(source.agent for source in sources.values())

    @source_check
    def check_sources_have_data(self) -> Iterator[Problem]:
        """Report sources without rows."""
        for name, source in (self.train_dataset.sources or {}).items():
            if not source.has_source:
                yield MissingSetting(f"{source_key(name)}.path", MISSING_ROWS)

    @require(
        "agent.whole_batch",
        "is true, but with rollout.max_head_offpolicyness above 0 agents start and end one by one, in no batch; set it "
        "to false",
    )
    def whole_batches_are_awaited(self) -> bool:
        return not self.agent.whole_batch or self.rollout.max_head_offpolicyness == 0
