"""Faults in the rollout, or in training beside a right rollout: the finding blames the one that is wrong."""

from __future__ import annotations

import pytest

from areno.checks.inputs.findings import Finding
from areno.checks.steps import two_steps
from areno.trainers import update
from tests.helpers.checked import findings, red

pytestmark = pytest.mark.slow

RUN = ["gspo quickstart", "gconfig.temperature=1.5"]
OVERLONG = ["gconfig.max_new_tokens=64", "actor.overlong_reward_penalty=true", "actor.overlong_tokens=16"]
OVERLONG += ["actor.overlong_penalty_factor=1"]


def line_of(found: list[Finding], name: str) -> str:
    return next(each.line for each in found if each.name == name)


@pytest.mark.parametrize("settings", [[], OVERLONG], ids=["as it is", "with a zone of overlong completions"])
def test_another_temperature_in_training_is_no_fault_of_the_rollout(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = update.update_actor
    monkeypatch.setattr(update, "update_actor", lambda *given, **how: right(*given, **{**how, "sampling": None}))
    monkeypatch.setattr(two_steps, "_draw", lambda *given: [])
    found = findings(*RUN, *settings, only="gradient,algorithm")
    assert red(found) == {"training-logprobs"}
    assert "they are at temperature 1" in line_of(found, "training-logprobs")


def test_nothing_is_red_in_a_run_with_a_zone_of_overlong_completions() -> None:
    found = findings(*RUN, *OVERLONG, only="gradient,algorithm,resume")
    assert not red(found)
    assert {each.name for each in found} >= {"loss-formula", "rollout-logprobs", "resume"}
