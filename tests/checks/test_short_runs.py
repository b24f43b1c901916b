"""The short runs of a check, with settings of the user that are lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areno.checks import short_runs
from areno.checks.inputs.findings import Finding
from areno.checks.inputs.subject import Options, Subject
from areno.checks.steps import two_steps
from areno.cli.given_command import split_command
from tests.helpers.checked import findings, red

OVERLONG = ["actor.overlong_reward_penalty=true", "actor.overlong_penalty_factor=1", "actor.overlong_tokens=16"]
DAPO = ["gspo quickstart", "gconfig.max_new_tokens=64", *OVERLONG]


def subject_of(folder: Path, command: str, *settings: str) -> Subject:
    recipe, task = command.split()
    given = split_command([recipe, f"--config-name={task}", *settings], "check")
    return Subject(given.algorithm, given.compose(), folder, Options())


def short_configs(subject: Subject) -> list[Any]:
    return [
        subject.small_config(two_steps.small_changes(subject.config)),
        short_runs._short_config(subject),
    ]


def test_the_zone_of_the_overlong_penalty_keeps_its_share_of_a_completion(tmp_path: Path) -> None:
    two, resumed = short_configs(subject_of(tmp_path, *DAPO))
    assert (two.gconfig.max_new_tokens, two.actor.overlong_tokens) == (12, 3)
    assert (resumed.gconfig.max_new_tokens, resumed.actor.overlong_tokens) == (8, 2)


@pytest.mark.parametrize(
    "settings",
    [
        ["gconfig.min_new_tokens=64"],
        ["actor.overlong_tokens=64"],
        ["gconfig.max_new_tokens=5", "gconfig.min_new_tokens=3", "actor.overlong_tokens=5"],
        ["gconfig.max_tokens=65"],
    ],
    ids=" ".join,
)
def test_lengths_that_a_run_allows_are_allowed_in_short_runs(settings: list[str], tmp_path: Path) -> None:
    for config in short_configs(subject_of(tmp_path, *DAPO, *settings)):
        assert 0 < config.actor.overlong_tokens <= config.gconfig.max_new_tokens <= 12
        assert config.gconfig.min_new_tokens <= config.gconfig.max_new_tokens


def test_short_completions_stay_as_they_are(tmp_path: Path) -> None:
    settings = "gconfig.max_new_tokens=7", "gconfig.min_new_tokens=3", "actor.overlong_tokens=4"
    for config in short_configs(subject_of(tmp_path, *DAPO, *settings)):
        found = config.gconfig.max_new_tokens, config.gconfig.min_new_tokens, config.actor.overlong_tokens
        assert found == (7, 3, 4)


def test_lengths_of_sources_shrink_with_those_of_the_run(tmp_path: Path) -> None:
    settings = "gconfig.max_new_tokens=48", "gconfig.n_samples=8", "train_dataset.sources.tools.n_samples=6"
    subject = subject_of(tmp_path, "gspo mixture", "actor.path=examples/countdown/model_cpu", *settings)
    config = subject.small_config(two_steps.small_changes(subject.config))
    source = config.train_dataset.sources["tools"]
    assert (source.max_new_tokens, source.n_samples) == (6, 4)  # 24 of 48 tokens


def refused(found: list[Finding], name: str) -> str:
    return next(each.line for each in found if each.name == name and each.verdict == "not checked")


def test_a_refused_short_run_is_told_as_one_without_advice_about_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"gconfig.max_new_tokens": 12}
    monkeypatch.setattr(two_steps, "shorter_samples", lambda *given: wrong)
    monkeypatch.setattr(short_runs, "shorter_samples", lambda *given: wrong)
    found = findings(*DAPO, only="gradient,algorithm,resume")
    for name in ("gradient-nonzero", "resume"):
        line = refused(found, name)
        assert "actor.overlong_tokens: is 16, more than gconfig.max_new_tokens=12" in line
        assert "lower it" not in line
        assert "not a fault of the run" in line
    assert not red(found)
