"""How settings name environments, and what an environment fills in."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from areno.environments import packages
from areno.environments.package import EnvironmentPackage
from areno.environments.packages import check_packages, package_of
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.recipes.distill import DistillConfig
from areno.recipes.gspo import GSPOConfig


class Toy(EnvironmentPackage):
    scheme, distribution, versions, extra = "toy", "numpy", ">=1", "toy"
    has_agent = True


class Other(EnvironmentPackage):
    scheme, distribution, versions, extra = "other", "no-such-package", ">=1", "other"
    gives_reward = True
    excludes = {"toy": "both need their own numpy"}  # noqa: RUF012


class Old(Toy):
    scheme, versions = "old", "<1"


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Toy, Other, Old):
        monkeypatch.setitem(packages.PACKAGES, kind.scheme, kind)


def made(*settings: str, config: Any = GSPOConfig, task: str = "environment") -> Any:
    return load(config, task, ["actor.path=folder", *settings], sources=True)


def test_names() -> None:
    environment = package_of("toy:a:b", "train_dataset.path")
    assert environment is not None
    assert (environment.name, environment.spec, environment.key) == ("a:b", "toy:a:b", "train_dataset.path")
    for text in (None, "toy", "toys:a", "rows.jsonl", "a/b:c"):
        assert package_of(text) is None


@pytest.mark.parametrize(
    ("settings", "path", "agent", "reward"),
    [
        (["train_dataset.path=toy:a"], "toy:a", "toy:a", None),
        (["agent.fn=toy:a"], "toy:a", "toy:a", None),
        (["agent.fn=toy:a", "train_dataset.path=rows.jsonl"], "rows.jsonl", "toy:a", None),
        (["agent.fn=toy:a", "train_dataset.loader=rows.py"], None, "toy:a", None),
        (["train_dataset.path=toy:a", "agent.fn=mine.py"], "toy:a", "mine.py", None),
        (["train_dataset.path=toy:a", "agent.command=echo"], "toy:a", "command", None),
        (["train_dataset.path=other:b"], "other:b", None, "other:b"),
        (["train_dataset.path=other:b", "reward.fn=math"], "other:b", None, "math"),
        (["train_dataset.path=other:b", "reward.path=model"], "other:b", None, None),
        (["train_dataset.path=rows.jsonl", "reward.fn=other:b"], "rows.jsonl", None, "other:b"),
    ],
)
def test_an_environment_gives_what_is_not_set(
    settings: list[str], path: str | None, agent: str | None, reward: str | None
) -> None:
    config = made(*settings)
    assert (config.train_dataset.path, config.agent.fn, config.reward.fn) == (path, agent, reward)


def test_distillation_needs_no_reward() -> None:
    settings = ["train_dataset.path=other:b", "teacher.path=large", "reward.fn=null", "valid_dataset=null"]
    assert made(*settings, config=DistillConfig, task="quickstart_distill").reward.fn is None


def test_an_environment_is_no_loader() -> None:
    with pytest.raises(ConfigError, match=r"train_dataset\.loader: is toy:a, which is no function; set it as path"):
        made("train_dataset.loader=toy:a", "reward.fn=math")


def test_a_package_that_is_missing_is_told_once() -> None:
    named = [("train_dataset.path", "other:b"), ("reward.fn", "other:b"), ("agent.fn", None)]
    with pytest.raises(ConfigError) as raised:
        check_packages(named)
    text = "train_dataset.path: other:b needs the package no-such-package: pip install 'areno[other]'"
    assert str(raised.value) == text


def test_a_package_of_another_version() -> None:
    with pytest.raises(ConfigError, match=r"agent\.fn: old:a needs numpy<1, but version \d.* is installed: pip inst"):
        check_packages([("agent.fn", "old:a")])


def test_packages_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.fn: other:b excludes toy:a: both need their own numpy$"):
        check_packages([("agent.fn", "toy:a"), ("reward.fn", "other:b")])


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed")
def test_verifiers_is_told_how_to_install() -> None:
    with pytest.raises(ConfigError, match=r"verifiers:a needs the package verifiers: pip install 'areno\[verifiers\]'"):
        check_packages([("train_dataset.path", "verifiers:a")])


def test_what_a_package_does_not_have() -> None:
    environment = Toy("a", "agent.fn")
    for part in (lambda: environment.rows("train", {}), environment.agent, environment.reward):
        with pytest.raises(ConfigError, match=r"^agent\.fn: toy:a has no (rows|agent|reward)"):
            part()


def test_tasks_need_a_program() -> None:
    with pytest.raises(ConfigError, match=r"agent\.command: missing; harbor:tasks has tasks for a program: set it"):
        made("train_dataset.path=harbor:tasks", "reward.fn=math")
    assert made("train_dataset.path=harbor:tasks", "agent.command=echo").reward.fn is None
