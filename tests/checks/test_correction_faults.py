"""Faults in weights of tokens, of a teacher or of a correction, found by name; nothing is red in the twin."""

from __future__ import annotations

from typing import Any

import pytest

from areno.checks.inputs.findings import Finding
from areno.checks.steps import corrections, gradient, two_steps
from areno.loss_fns import token_selection
from areno.loss_fns.teacher_signals import RLSD, SDAR
from areno.trainers import off_policy_correction
from tests.helpers.checked import failed, found_by, red

pytestmark = pytest.mark.slow

DECOUPLED = ("actor.use_decoupled_loss=true",)
TIS = (*DECOUPLED, *(f"actor.rejection_sampling.{each}" for each in ("action=clamp", "upper=2", "lower=0.5")))
ICEPOP = (*DECOUPLED, "actor.rejection_sampling.upper=2", "actor.rejection_sampling.lower=0.5")
KPOP = (*DECOUPLED, "actor.rejection_sampling.metric=binary_kl", "actor.rejection_sampling.upper=0.05")
ROWS = (*DECOUPLED, "actor.rejection_sampling.level=sequence", "actor.rejection_sampling.agg=sum")
M2 = ("actor.m2_threshold=0.04",)
right, right_m2 = off_policy_correction.behave_weights, off_policy_correction.m2_keep


@pytest.fixture(autouse=True)
def without_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_steps, "_draw", lambda *given: [])


def corrected(*settings: str) -> list[Finding]:
    return found_by(corrections.CHECKS, "grpo", "--config-name=quickstart", *settings)


def upside_down(prox: Any, behave: Any, **how: Any) -> Any:
    return right(behave, prox, **how)


def unbounded(prox: Any, behave: Any, **how: Any) -> Any:
    return right(prox, behave)


def of_tokens(prox: Any, behave: Any, **how: Any) -> Any:
    return right(prox, behave, **how | {"level": "token"})


def higher(prox: Any, behave: Any, **how: Any) -> Any:
    return right(prox, behave, **how | {"upper": 1.2 * how["upper"]})


def looser_m2(prox: Any, behave: Any, advantages: Any, threshold: float) -> Any:
    return right_m2(prox, behave, advantages, 2 * threshold)


@pytest.mark.parametrize(
    ("settings", "wrong", "said"),
    [
        (DECOUPLED, upside_down, "the ratio is upside down"),
        (TIS, unbounded, "rejection_sampling is left out"),
        (ICEPOP, higher, "not trained as the settings say"),
        (KPOP, unbounded, "rejection_sampling is left out"),
        (ROWS, of_tokens, "as the settings say"),
        (M2, looser_m2, "not weighted as the settings say"),
    ],
)
def test_a_wrong_correction_is_found(
    settings: tuple[str, ...], wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_steps, "make_probes", lambda *given: None)
    twin = corrected(*settings)
    assert [(each.name, each.verdict) for each in twin] == [("correction-weights", "green")], twin
    monkeypatch.setattr(off_policy_correction, "m2_keep" if settings == M2 else "behave_weights", wrong)
    [found] = corrected(*settings)
    assert found.verdict == "red"
    assert said in found.line


def test_weights_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_steps, "make_probes", lambda *given: None)
    monkeypatch.setattr(off_policy_correction, "set_trained", lambda *given: None)
    [found] = corrected(*DECOUPLED)
    assert "in step 1 are not those of the formula" in found.line


right_covariances = token_selection._covariances


def with_wrong_sign(logprobs_T: Any, advantages_T: Any) -> Any:
    return -right_covariances(logprobs_T, advantages_T)


def test_other_tokens_of_a_selection_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_steps, "make_probes", lambda *given: None)
    selected = ("actor.token_selection=kl_cov", "actor.kl_cov.share=0.2")
    assert [each.verdict for each in corrected(*selected)] == ["green"]
    monkeypatch.setattr(token_selection, "_covariances", with_wrong_sign)
    [found] = corrected(*selected)
    assert "others than the formula" in found.line
    entropy = ("actor.token_selection=top_entropy", "actor.use_decoupled_loss=true")
    assert [each.verdict for each in corrected(*entropy)] == ["green", "green"]
    choose = token_selection.TopEntropy.choose
    monkeypatch.setattr(token_selection.TopEntropy, "choose", lambda *given: ~choose(*given))
    assert "others than the formula" in corrected(*entropy)[1].line


right_losses = SDAR.losses
SIGNALS = {
    "rlsd": (RLSD, "advantages", lambda self, advantages_T, gap_T: advantages_T),
    "sdar": (SDAR, "losses", lambda self, gap_T: -right_losses(self, gap_T)),
}


@pytest.mark.parametrize(("signal", "said"), [("rlsd", "signal of the teacher"), ("sdar", "by the formula")])
def test_a_wrong_signal_of_a_teacher_is_found(signal: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "train_dataset.loader=examples/quickstart/dataset_loader.py:with_responses"
    command = "grpo", "--config-name=quickstart", rows, f"variant={signal}"
    twin = found_by(gradient.CHECKS[:3], *command)
    assert not red(twin) | {each.name for each in failed(twin)}, twin
    assert "off-policy-loss" in {each.name for each in twin if each.verdict == "green"}
    monkeypatch.setattr(*SIGNALS[signal])
    found = {each.name: each.line for each in found_by(gradient.CHECKS[:3], *command) if each.verdict == "red"}
    assert said in found["off-policy-loss"]
