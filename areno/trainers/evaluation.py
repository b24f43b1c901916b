"""Evaluation of a model folder with the settings of a run: its data, its reward, its way to sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from areno.config.experiments import PolicyExperimentConfig
from areno.config.run import EvaluatorConfig, SaverConfig
from areno.config.tracking.stats_logger import StatsLoggerConfig
from areno.plan.lora import with_model
from areno.run.setup import Setup
from areno.trainers.collect import evaluate_policy


def without_training(config: PolicyExperimentConfig, model: str) -> PolicyExperimentConfig:
    """The settings of a run that only evaluates a model: no checkpoints, no states, no services."""
    console = "lines" if config.stats_logger.console in ("auto", "live") else config.stats_logger.console
    return replace(
        config,
        actor=with_model(config.actor, model),
        evaluator=EvaluatorConfig(),
        recover=replace(config.recover, mode="off"),
        saver=SaverConfig(),
        stats_logger=StatsLoggerConfig(console=console),
    )


def evaluate_model(config: PolicyExperimentConfig, folder: Path, step: int = 0) -> Mapping[str, float]:
    """Sample and score every set of valid_dataset; the metrics by name, without eval/.

    folder: gets logs/ and eval/<step>.jsonl, like the folder of a run.
    """
    setup = Setup(
        config, "evaluation", type(config), "prompt", (), evaluate_policy, run_dir=folder, trains=False
    )  # fmt: skip
    try:
        setup.run.step = step
        return setup.run.evaluate()
    finally:
        setup.run.step = 0  # nothing was trained that could go on
        setup.close()
