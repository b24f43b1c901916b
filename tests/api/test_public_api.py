"""The public surface is a list, and every name on it can be had."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import areno

PUBLIC = {
    "Areno",
    "ArenoConfig",
    "DPOTrainer",
    "DistillTrainer",
    "KTOTrainer",
    "ModelRole",
    "OnlineDPOTrainer",
    "PPOTrainer",
    "PolicyOnlyTrainer",
    "ProcessRewardTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
    "SamplingParams",
    "TrainSequence",
    "Trainer",
}


def test_the_list_is_what_we_promise() -> None:
    assert set(areno.__all__) == PUBLIC


def test_every_name_can_be_imported_and_is_documented() -> None:
    for name in areno.__all__:
        assert getattr(areno, name).__doc__


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("areno.api", ["Algorithm", "algorithm_names", "get_algorithm", "register_algorithm"]),
        (
            "areno.api.agentic",
            ["AgentBatch", "AgentItem", "AgentTrajectory", "AgentTrajectoryTurn", "LossMaskPolicy", "RewardRecord"],
        ),
        ("areno.api.metrics", ["MetricsRecorder"]),
        ("areno.loss_fns", ["dpo_loss_fn", "grpo_loss_fn", "gspo_loss_fn", "ppo_loss_fn", "sft_loss_fn"]),
    ],
)
def test_modules_have_the_names_that_we_promise(module: str, names: list[str]) -> None:
    """Defined there, so that an error and a pickle name them so, or listed there."""
    found = import_module(module)
    for name in names:
        assert getattr(found, name).__doc__
        assert getattr(found, name).__module__ == module or name in found.__all__


def test_other_names_are_an_attribute_error() -> None:
    assert not hasattr(areno, "Trianer")


def test_import_is_light() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'datasets', 'hydra', 'omegaconf'}"
    code = f"import sys, areno; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
