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
    path, loader, agent = (
        _get(found, "train_dataset.path"),
        _get(found, "train_dataset.loader"),
        _get(found, "agent.fn"),
    )
    if path is None and loader is None and package_of(_text(agent)) is not None:
        path = agent
        _set(found, "train_dataset.path", path)
    environment = None if loader is not None else package_of(_text(path))
    if environment is not None and environment.has_agent and agent is None:
        _set(found, "agent.fn", path)
    if environment is not None and environment.gives_reward and needs_reward and not _has_reward(found["reward"]):
        _set(found, "reward.fn", path)
    return found


def _with_sources(values: dict[str, Any], sources: Mapping[str, Any], needs_reward: bool) -> dict[str, Any]:
    """Fill sources in the same way. If one has an agent, those without have single completions."""
    shared = _get(values, "agent.fn")
    filled = {}
    for name, source in sources.items():
        filled[name] = source
        if not isinstance(source, Mapping | Section):
            continue
        path, loader, agent = (_value(source, key) for key in ("path", "loader", "agent"))
        if path is None and loader is None and package_of(_text(agent)) is not None:
            path = agent
        given = {"path": path}
        environment = None if loader is not None else package_of(_text(path))
        if environment is not None and environment.has_agent and agent is None and shared in (None, COMPLETION):
            given["agent"] = path
        if environment is not None and environment.gives_reward and needs_reward and not _value(source, "reward"):
            given["reward"] = path
        filled[name] = _with(source, given)
    if filled != dict(sources):
        _set(values, "train_dataset.sources", filled)
    sections = [each for each in filled.values() if isinstance(each, Mapping | Section)]
    if shared is None and any(_value(each, "agent") is not None for each in sections):
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
