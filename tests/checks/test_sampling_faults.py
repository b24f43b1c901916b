"""Faults in the draws of the rollout, each found by its name; nothing is red in the twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from areno.checks.inputs.findings import Finding
from areno.checks.steps import algorithm, draws, model_numbers, two_steps
from areno.engine.decoder import sampler
from areno.kernels.sampling import reference
from areno.trainers import rows
from tests.helpers.checked import failed, found_by, red

pytestmark = pytest.mark.slow

right = reference.sample_tokens
LIMITS = ("gconfig.temperature=1.5", "gconfig.top_k=8", "gconfig.top_p=0.9", "gconfig.min_p=0.02")
GREEDY = ("gconfig.greedy=true", "gconfig.n_samples=1", "actor.adv_norm=null")
SHORT = ("gconfig.min_new_tokens=4", "actor.mask_no_eos_with_zero=true", "gconfig.max_new_tokens=4")


@pytest.fixture(autouse=True)
def without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_steps, "make_probes", lambda *given: None)


def checked(*settings: str) -> list[Finding]:
    checks = [*draws.CHECKS, model_numbers.CHECKS[1], algorithm.CHECKS[0]]
    return found_by(checks, "grpo", "--config-name=quickstart", *settings)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (LIMITS, {"allowed-tokens", "rollout-logprobs"}),
        (["gconfig.top_k=3", "gconfig.temperature=0.5"], {"sampled-tokens", "allowed-tokens", "completion-ends"}),
        (["gconfig.frequency_penalty=0.5", "gconfig.presence_penalty=0.4"], {"rollout-logprobs"}),
        (GREEDY, {"allowed-tokens"}),
        (SHORT, {"training-rows", "completion-ends"}),
    ],
)
def test_right_draws_are_green(settings: list[str], names: set[str]) -> None:
    found = checked(*settings)
    assert not red(found), found
    assert not failed(found)
    assert names <= {each.name for each in found if each.verdict == "green"}, found


def at_temperature_1(logits_BV: Any, temperature_B: Any, *given: Any, **how: Any) -> Any:
    how["edited_BV"] = logits_BV * temperature_B[:, None]
    return right(logits_BV, temperature_B, *given, **how)


def the_most_likely(logits_BV: Any, temperature_B: Any, *given: Any, **how: Any) -> Any:
    least = logits_BV.topk(1).values[:, -1:]
    how["edited_BV"] = torch.where(logits_BV < least, -torch.inf, logits_BV)
    return right(logits_BV, temperature_B, *given, **how)


def without_limits(*given: Any, **how: Any) -> Any:
    return right(*given, **how | {"top_k_B": None, "top_p_B": None})


def half_of_top_k(*given: Any, **how: Any) -> Any:
    return right(*given, **how | {"top_k_B": how["top_k_B"] // 2})


def less_top_p(*given: Any, **how: Any) -> Any:
    return right(*given, **how | {"top_p_B": how["top_p_B"] ** 2})


def never_greedy(logits_BV: Any, temperature_B: Any, greedy_B: Any, *given: Any, **how: Any) -> Any:
    return right(logits_BV, temperature_B, torch.zeros_like(greedy_B), *given, **how)


def of_the_limited(logits_BV: Any, temperature_B: Any, *given: Any, **how: Any) -> Any:
    tokens_B, logprobs_B = right(logits_BV, temperature_B, *given, **how)
    best = (logits_BV / temperature_B[:, None]).log_softmax(-1).topk(3).values.logsumexp(-1)
    return tokens_B, logprobs_B - best


@pytest.mark.parametrize(
    ("wrong", "settings", "name", "said"),
    [
        (at_temperature_1, ["gconfig.temperature=0.5"], "sampled-tokens", "they fit draws at 1"),
        (the_most_likely, ["gconfig.temperature=3"], "sampled-tokens", "more likely"),
        (without_limits, LIMITS, "allowed-tokens", "top_k=8, top_p=0.9, min_p=0.02 leaves out"),
        (half_of_top_k, ["gconfig.top_k=6", "gconfig.temperature=4"], "sampled-tokens", "top_k=6"),
        (less_top_p, ["gconfig.top_p=0.8", "gconfig.temperature=3"], "sampled-tokens", "top_p=0.8"),
        (never_greedy, [*GREEDY, "gconfig.temperature=2"], "allowed-tokens", "greedy=true leaves out"),
        (of_the_limited, ["gconfig.top_k=3"], "rollout-logprobs", "among the tokens that gconfig leaves"),
    ],
)
def test_draws_from_other_distributions_are_found(
    wrong: Any, settings: list[str], name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "sample_tokens", wrong)
    found = checked(*settings)
    assert name in red(found), found
    assert said in next(each.line for each in found if each.name == name and each.verdict == "red")


def test_other_limits_and_ends_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SHORT, "gconfig.min_p=0.2", "gconfig.temperature=2"]
    assert not red(checked(*settings))
    for_batch = sampler.LogitEdits.for_batch

    def without_min_p(*given: Any) -> Any:
        found = for_batch(*given)
        return None if found is None else replace(found, min_p_R=0 * found.min_p_R)

    monkeypatch.setattr(sampler.LogitEdits, "for_batch", without_min_p)
    make = rows.policy_rows
    monkeypatch.setattr(
        "areno.trainers.update.policy_rows", lambda *given, **how: make(*given[:3], False, *given[4:], **how)
    )
    monkeypatch.setattr("areno.trainers.forward_passes.policy_rows", make)
    found = {each.name: each.line for each in checked(*settings) if each.verdict == "red"}
    assert "min_p=0.2 leaves out" in found["allowed-tokens"]
    assert "cut off at gconfig.max_new_tokens, and is trained" in found["loss-mask"]
