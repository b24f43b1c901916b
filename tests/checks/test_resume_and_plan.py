"""Runs that do not resume as they were, and runs that do not fit."""

from __future__ import annotations

import pytest

from areno.data.loader import BatchLoader
from tests.helpers.checked import failed, findings, red


@pytest.mark.parametrize("command", ["gspo quickstart", "dpo quickstart_dpo"])
def test_two_and_two_steps_are_four(command: str) -> None:
    found = findings(command, only="resume,plan")
    assert not red(found), found
    assert not failed(found)


def test_a_state_that_forgets_the_place_in_the_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchLoader, "load_state_dict", lambda loader, state: None)
    assert red(findings("dpo quickstart_dpo", only="resume")) == {"resume"}


def test_a_run_that_does_not_fit_is_found() -> None:
    found = findings("gspo gsm8k", "actor.path=Qwen/Qwen3-32B", only="plan", device="rtx-4090")
    assert red(found) == {"fits"}
