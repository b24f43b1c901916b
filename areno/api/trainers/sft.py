"""The loop of supervised fine-tuning: encode rows, train on their responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from areno.api.attended import attended
from areno.api.trainers.measure_loss import measure_loss
from areno.api.trainers.rows import token_rows
from areno.api.trainers.setup import Setup
from areno.api.trainers.update import update
from areno.config.experiments import SupervisedExperimentConfig
from areno.types import Batch, TrainSequence

HEADLINE = ("train/loss", "train/lr")


class SFTTrainer(AbstractContextManager["SFTTrainer"]):
    """Trains a model on demonstrations.

    run_dir: where logs and checkpoints go; None is a new folder under cluster.fileroot.
    train_dataset, valid_dataset: rows of a script (a list of dictionaries, or anything with a length and indexing), in
    place of the configured paths.

    Construction checks what can be checked and loads the model. Use as a context manager, or call close().
    """

    def __init__(
        self,
        config: SupervisedExperimentConfig,
        run_dir: str | Path | None = None,
        *,
        train_dataset: Any = None,
        valid_dataset: Any = None,
    ):
        self.setup = Setup(
            config, "SFTTrainer", SupervisedExperimentConfig, "sft", HEADLINE,
            lambda _, name, loader: self.measure(loader.batches()),
            run_dir=run_dir, train_dataset=train_dataset, valid_dataset=valid_dataset,
        )  # fmt: skip
        self.run = self.setup.run

    @attended
    def fit(self) -> float:
        """Run to the end. Returns the last evaluation loss or, without one, the training loss of the last step."""
        run = self.run
        for batch in run.steps():
            stats = update(self.setup, batch.items)
            run.keep(loss=stats["loss"])
            run.log_skipped(batch)
            run.end_step(stats)
        run.finish({"loss": 1, "eval_loss": 1})
        return run.result("eval_loss", "loss")

    def measure(self, batches: Iterator[Batch[TrainSequence]]) -> dict[str, float]:
        """loss: mean negative log-likelihood of the response tokens of all rows."""
        rows, logprobs = [], []
        for batch in batches:
            rows += batch.items
            logprobs += self.setup.trainer.score_logprobs("actor", token_rows(batch.items), 1.0)
        return {"loss": measure_loss(self.setup.loss_fn, rows, logprobs)["loss"]}

    def evaluate(self) -> dict[str, float]:
        """Measure the whole of valid_dataset; records and returns eval/* scalars by name."""
        return self.run.evaluate()

    def close(self) -> None:
        """End the processes of the run, and close its logs."""
        self.setup.close()

    def __exit__(self, *exc: object) -> None:
        self.close()
