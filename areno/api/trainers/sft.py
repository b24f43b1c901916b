"""The loop of supervised fine-tuning: encode rows, train on their responses."""

from __future__ import annotations

from collections.abc import Iterator

from areno.api.trainers.evaluate import measure_loss
from areno.api.trainers.loop import RowLoop
from areno.api.trainers.rows import token_rows
from areno.api.trainers.update import update
from areno.config.experiments import SupervisedExperimentConfig
from areno.types import Batch, TrainSequence


class SFTTrainer(RowLoop[SupervisedExperimentConfig]):
    """Trains a model on demonstrations.

    run_dir: where logs and checkpoints go; None is a new folder under cluster.fileroot.
    train_dataset, valid_dataset: rows of a script (a list of dictionaries, or anything with a length and indexing), in
    place of the configured paths.

    Construction checks what can be checked and loads the model. Use as a context manager, or call close().
    """

    _needed = SupervisedExperimentConfig
    _kind = "sft"
    _headline = ("train/loss", "train/lr")

    def fit(self) -> float:
        """Run to the end. Returns the last evaluation loss or, without one, the training loss of the last step."""
        run = self.run
        for batch in run.steps():
            stats = update(self, batch.items)
            run.keep(loss=stats["loss"])
            run.log_skipped(batch)
            run.end_step(stats)
        run.finish({"loss": 1, "eval_loss": 1})
        return run.result("eval_loss", "loss")

    def measure(self, batches: Iterator[Batch[TrainSequence]]) -> dict[str, float]:
        """loss: mean negative log-likelihood of the response tokens of all rows."""
        rows = [row for batch in batches for row in batch.items]
        logprobs = self.trainer.score_logprobs("actor", token_rows(rows), 1.0)
        return {"loss": measure_loss(self.loss_fn, rows, logprobs)["loss"]}
