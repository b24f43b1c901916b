"""The time predicted for steps of small models, against measurements on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.api.algorithms import get_algorithm
from areno.launch.compose import load
from areno.models.known_shapes import published_config
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import hardware_of
from tests.helpers.pages import ROOT

SAMPLES = ["train_dataset.batch_size=32", "gconfig.n_samples=8", "gconfig.max_new_tokens=256"]
REFERENCE = ["ref=default", "actor.kl_ctl=0.1", "critic.gradient_checkpointing=true", "critic.ppo_n_minibatches=1"]
SMALL: list[tuple[str, str, list[str], int, dict[str, float]]] = [
    ("sft", "25m", ["train_dataset.batch_size=64"], 256, {"train actor": 0.049}),
    ("sft", "25m", ["train_dataset.batch_size=256"], 256, {"train actor": 0.166}),
    ("grpo", "25m", ["actor.share_prefixes=auto"], 64, {"rollout": 0.221, "train actor": 0.146}),
    (
        *("ppo", "25m", ["gconfig.n_samples=1", "train_dataset.batch_size=256", *REFERENCE], 64),
        {"rollout": 0.271, "score ref": 0.059, "score critic": 0.025, "train critic": 0.079, "train actor": 0.165},
    ),
    ("sft", "qwen3-0.6b", ["train_dataset.batch_size=64"], 256, {"train actor": 0.276}),
    ("grpo", "qwen3-0.6b", ["actor.share_prefixes=auto"], 64, {"rollout": 0.732, "train actor": 0.635}),
    (
        *("ppo", "qwen3-0.6b", ["gconfig.n_samples=1", "train_dataset.batch_size=256", *REFERENCE], 64),
        {"rollout": 0.898, "score ref": 0.227, "score critic": 0.179, "train critic": 0.570, "train actor": 0.739},
    ),
]
"""Recipe, shape, settings, tokens of a prompt, and seconds on an H200. The host's part of a step counts as rollout."""
COUNTDOWN: list[tuple[str, list[str], tuple[int, int], dict[str, float]]] = [
    ("sft", ["train_dataset.batch_size=256", "train_dataset.max_length=320"], (30, 30), {"train actor": 0.046}),
    ("grpo", [], (15, 96), {"rollout": 0.231, "train actor": 0.090}),
    (
        *("ppo", ["critic.gradient_checkpointing=false", "ref=null", "actor.kl_ctl=0"], (15, 96)),
        {"rollout": 0.323, "score critic": 0.052, "train critic": 0.127, "train actor": 0.152},
    ),
]
"""The same of 1,024 samples of a model with 25M parameters and 21 tokens in its vocabulary."""


def assert_near(found: Forecast, seconds: dict[str, float]) -> None:
    assert found.step_seconds == pytest.approx(sum(seconds.values()), rel=0.2)
    assert {phase.name: phase.seconds for phase in found.phases} == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize(("recipe", "shape", "settings", "prompt", "seconds"), SMALL)
def test_small_models_against_measurements(
    recipe: str, shape: str, settings: list[str], prompt: int, seconds: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config(shape)))
    words = [f"actor.path={tmp_path}", *settings, "actor.gradient_checkpointing=true", "valid_dataset=null"]
    if recipe == "sft":
        words += ["train_dataset.max_length=4096"]
    else:
        words = [*SAMPLES, "train_dataset.max_length=512", *words]
    last = list({word.partition("=")[0]: word for word in words}.values())
    made = load(get_algorithm(recipe).config, "quickstart_base" if recipe == "sft" else "quickstart", last)
    assert_near(forecast(made, hardware_of("h200"), 1, prompt, 256), seconds)


@pytest.mark.parametrize(("recipe", "settings", "lengths", "seconds"), COUNTDOWN)
def test_many_short_samples_against_measurements(
    recipe: str, settings: list[str], lengths: tuple[int, int], seconds: dict[str, float]
) -> None:
    words = [f"actor.path={ROOT / 'examples/countdown/model'}", "valid_dataset=null", *settings]
    task = "quickstart_base" if recipe == "sft" else "quickstart"
    if recipe != "sft":
        words += ["train_dataset.batch_size=64", "gconfig.n_samples=16", "gconfig.max_new_tokens=96"]
    assert_near(forecast(load(get_algorithm(recipe).config, task, words), hardware_of("h200"), 1, *lengths), seconds)
