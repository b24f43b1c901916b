"""How an environment that one setting names fills other settings. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from areno.config.agent import COMPLETION
from areno.config.datasets import DatasetConfig
from areno.config.sources import PromptDatasetConfig
from areno.environments.packages import package_of
from areno.schema.fields import Section


def with_environment(values: Mapping[str, Any], needs_reward: bool) -> dict[str, Any]:
    """Return the settings of a run or a source, in which an environment SCHEME:NAME gives what is not set.

    An environment in agent.fn is also the source of the rows. One in train_dataset.path is also the agent if it has
    one, and the reward if it gives one and `needs_reward`.
    """
    found = dict(values)
    if type(section := found.get("train_dataset")) is DatasetConfig:  # of a script
        found["train_dataset"] = PromptDatasetConfig.of(section)
    if not all(isinstance(found.get(name), Mapping | Section) for name in ("train_dataset", "agent", "reward")):
        return found  # which has an error of its own
    if isinstance(sources := _value(found["train_dataset"], "sources"), Mapping):
        return _with_sources(found, sources, needs_reward)
    data, agent = found["train_dataset"], _get(found, "agent.fn")
    given = _from_environment(data, agent, agent is None, needs_reward and not _has_reward(found["reward"]))
    for key, name in (("path", "train_dataset.path"), ("agent", "agent.fn"), ("reward", "reward.fn")):
        if key in given:
            _set(found, name, given[key])
    return found


def _from_environment(rows: Any, agent: Any, needs_agent: bool, needs_reward: bool) -> dict[str, Any]:
    """Return what an environment gives, of "path", "agent" and "reward", if path or agent names one."""
    path, loader = _value(rows, "path"), _value(rows, "loader")
    if loader is not None:
        return {}
    found = {}
    if path is None and package_of(_text(agent)) is not None:
        path = found["path"] = agent
    environment = package_of(_text(path))
    if environment is not None and environment.has_agent and needs_agent:
        found["agent"] = path
    if environment is not None and environment.gives_reward and needs_reward:
        found["reward"] = path
    return found


def _with_sources(values: dict[str, Any], sources: Mapping[str, Any], needs_reward: bool) -> dict[str, Any]:
    """Fill sources in the same way. If one has an agent, those without have single completions."""
    shared = _get(values, "agent.fn")
    filled = dict(sources)
    sections = {name: source for name, source in sources.items() if isinstance(source, Mapping | Section)}
    for name, source in sections.items():
        agent = _value(source, "agent")
        needs_agent = agent is None and shared in (None, COMPLETION)
        given = _from_environment(source, agent, needs_agent, needs_reward and not _value(source, "reward"))
        filled[name] = _with(source, given)
    if filled != dict(sources):
        _set(values, "train_dataset.sources", filled)
    if shared is None and any(_value(filled[name], "agent") is not None for name in sections):
        _set(values, "agent.fn", COMPLETION)
    return values


def _has_reward(reward: Mapping[str, Any] | Section) -> bool:
    judge = _value(reward, "judge")
    judges = [_value(judge, name) for name in ("path", "base_url")] if isinstance(judge, Mapping | Section) else []
    return any(value is not None for value in (_value(reward, "fn"), _value(reward, "path"), *judges))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _value(section: Mapping[str, Any] | Section, name: str) -> Any:
    return (section if isinstance(section, Mapping) else vars(section)).get(name)


def _get(values: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return _value(values[section], name)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    values[section] = _with(values[section], {name: value})


def _with(section: Any, changed: Mapping[str, Any]) -> Any:
    changed = {name: value for name, value in changed.items() if _value(section, name) != value}
    if not changed:
        return section
    return {**section, **changed} if isinstance(section, Mapping) else dataclasses.replace(section, **changed)
