"""Tokens that are drawn from other distributions than those that the rollout records; nothing is red in the twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno.checks.inputs.findings import Finding
from areno.kernels.sampling import reference
from tests.helpers.checked import failed, findings, red

pytestmark = pytest.mark.slow

right = reference.sample_tokens


def at_temperature_1(logits_BV: Any, temperature_B: Any, *given: Any, **how: Any) -> Any:
    how["edited_BV"] = logits_BV * temperature_B[:, None]
    return right(logits_BV, temperature_B, *given, **how)


def the_most_likely(logits_BV: Any, temperature_B: Any, *given: Any, **how: Any) -> Any:
    least = logits_BV.topk(1).values[:, -1:]
    how["edited_BV"] = torch.where(logits_BV < least, -torch.inf, logits_BV)
    return right(logits_BV, temperature_B, *given, **how)


def checked(*settings: str) -> list[Finding]:
    return findings("grpo quickstart", *settings, only="algorithm")


def test_right_draws_are_green() -> None:
    found = checked("gconfig.temperature=0.5")
    assert not red(found)
    assert not failed(found)
    assert "sampled-tokens" in {each.name for each in found if each.verdict == "green"}
    [other] = [each for each in checked("gconfig.top_k=3") if each.name == "sampled-tokens"]
    assert other.verdict == "not checked"


@pytest.mark.parametrize(
    ("wrong", "temperature", "said"),
    [(at_temperature_1, 0.5, "they fit draws at 1"), (the_most_likely, 3.0, "more likely")],
)
def test_draws_from_other_distributions_are_found(
    wrong: Any, temperature: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "sample_tokens", wrong)
    found = checked(f"gconfig.temperature={temperature}")
    assert "sampled-tokens" in red(found)
    assert said in next(each.line for each in found if each.name == "sampled-tokens")
