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


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import areno", "torch numpy transformers datasets hydra omegaconf"),
        ("import areno.api.metrics, areno.scoring.pool, areno.data.sources, areno.run.checkpoints", "torch"),
        ("import areno.plan.tuning_candidates", "torch"),
        ("import areno.tracking.reader", "torch numpy transformers"),
        ("import areno.tracking.recorder", "wandb trackio swanlab mlflow"),
        (
            "import areno; areno.Trainer(2, 'Qwen/Qwen3.5-4B', areno.Areno, areno.ArenoConfig(tp_size=2)).close()",
            "torch transformers datasets",
        ),
        pytest.param(
            "from areno.cli.__main__ import main; main('plan --device h200 --ckpt Qwen/Qwen3-0.6B'.split())",
            "torch transformers datasets",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_needs_no_heavy_package_imports_none(code: str, heavy: str) -> None:
    script = f"import sys\n{code}\nsys.exit(', '.join({set(heavy.split())} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
