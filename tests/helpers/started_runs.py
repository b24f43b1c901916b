"""Runs without an engine: a data loader of numbered rows, and a `Run` over it."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from areno.config.datasets import DatasetConfig
from areno.config.models import ModelConfig
from areno.config.run import RecoverConfig
from areno.data.loader import BatchLoader, TokenLimit
from areno.recipes.sft import SFTConfig
from areno.run.evaluator import Evaluator
from areno.run.outputs import RunTexts
from areno.run.run import Run
from areno.types import TrainSequence


def loader(n_rows: int = 2, **settings: Any) -> BatchLoader[TrainSequence]:
    """Batches of one row, whose only token is the row's number."""
    return BatchLoader(
        [{}] * n_rows,
        lambda rows, indices: [TrainSequence(tokens=[index]) for index in indices],
        DatasetConfig(**{"path": "rows.jsonl", "batch_size": 1, "shuffle": False, **settings}),
        TokenLimit(8, "max_length"),
    )


def start(
    folder: Path,
    n_rows: int = 2,
    evaluate: Any = None,
    data: dict[str, Any] | None = None,
    save: Any = lambda at: (at / "x").write_text("x"),
    is_saved: Any = lambda: True,
    facts: Any = MappingProxyType({}),
    **settings,
) -> Run:
    given = {"actor": ModelConfig(path="model"), "train_dataset": DatasetConfig(path="rows.jsonl"), **settings}
    config = SFTConfig(experiment_name="e", recover=RecoverConfig(mode="off"), **given)
    engine = SimpleNamespace(device_names=["cpu"], state_digests=dict)
    models: Any = SimpleNamespace(
        engine=lambda: engine, write_checkpoint=save, checkpoint_written=is_saved, forecast=None
    )
    rows = loader(n_rows, **(data or {}))
    evaluator = None if evaluate is None else Evaluator(config, {"": loader(1)}, lambda name, of_set: evaluate())
    return Run(config, folder, rows, models, evaluator=evaluator, texts=RunTexts(facts=facts))
