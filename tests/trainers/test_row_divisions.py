"""Trainers of rows train alike however a batch is cut into micro-batches, and on a GPU as on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import areno
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.run import EngineConfig
from tests.helpers import row_runs
from tests.helpers.row_runs import LABELLED, PAIRS, RATED, STEP_LABELLED, optimizer, scalars

# The body of a process reward model has no gradient before the first step. Adam with a smaller eps would multiply the
# rounding errors.
CALM = OptimizerConfig(lr=1e-3, eps=1e-4, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
RUNS: dict[str, tuple[Any, Any, list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "dpo": (areno.DPOTrainer, row_runs.dpo_config, PAIRS, {}, {"total_train_steps": 3}),
    "kto": (areno.KTOTrainer, row_runs.kto_config, LABELLED, {"optimizer": optimizer(1e-3)}, {"total_train_steps": 5}),
    "rw": (
        areno.RewardModelTrainer,
        row_runs.reward_model_config,
        RATED,
        {},
        {"total_train_steps": 3, "batch_size": 3},
    ),
    "prm": (
        areno.ProcessRewardTrainer,
        row_runs.process_reward_config,
        STEP_LABELLED,
        {"optimizer": CALM},
        {"total_train_steps": 3, "batch_size": 3},
    ),
}


def metrics_of(recipe: str, folder: Path, actor: dict[str, Any], **more: Any) -> dict[str, list[float]]:
    trainer_of, config_of, rows, own_actor, settings = RUNS[recipe]
    config = config_of(folder, actor=own_actor | actor, **settings | more)
    with trainer_of(config, train_dataset=rows, valid_dataset=rows[:5]) as trainer:
        trainer.fit()
        return scalars(trainer.run.folder)


@pytest.mark.parametrize(
    ("recipe", "longest", "names", "absolute", "relative"),
    [
        pytest.param("dpo", 30, "loss grad_norm margin", 1e-5, 1e-4, marks=pytest.mark.slow),
        pytest.param("kto", 30, "kl loss grad_norm margin", 1e-4, 1e-3, marks=pytest.mark.slow),
        pytest.param("rw", 40, "loss grad_norm margin rewards_mean", 1e-5, 1e-3, marks=pytest.mark.slow),
        ("prm", 40, "loss grad_norm margin rewards_mean first_error_accuracy", 1e-5, 1e-3),
    ],
)
def test_any_cut_of_a_batch_trains_alike(
    recipe: str, longest: int, names: str, absolute: float, relative: float, tmp_path: Path
) -> None:
    found = []
    for cut in ({"mini_bs": 1}, {"mini_bs": 4}, {"mini_bs": 64}, {"max_tokens_per_mb": longest}):
        told = metrics_of(recipe, tmp_path, {"mb_spec": MicroBatchSpec(**cut)})
        found.append([told[f"train/{name}"] for name in names.split()])
    assert recipe != "kto" or max(found[0][0]) > 0
    for other in found[1:]:
        for values, expected in zip(other, found[0], strict=True):
            np.testing.assert_allclose(values, expected, atol=absolute, rtol=relative)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["kto", "rw"])
def test_a_gpu_trains_as_a_cpu(recipe: str, tmp_path: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        told = metrics_of(recipe, tmp_path, {"dtype": "float32"}, engine=EngineConfig(device=device, world_size=1))
        found.append([told[name] for name in ("train/loss", "train/margin", "eval/loss", "eval/margin")])
    for on_cpu, on_cuda in zip(*found, strict=True):
        np.testing.assert_allclose(on_cuda, on_cpu, atol=1e-3, rtol=1e-2)
