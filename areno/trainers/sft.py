"""The loop of supervised fine-tuning: encode rows, train on their responses."""

from __future__ import annotations

from collections.abc import Iterator

from areno.config.experiments import SupervisedExperimentConfig
from areno.run.setup import attended
from areno.trainers.loop import RowLoop
from areno.trainers.rows import token_rows
from areno.trainers.update import measure_loss, update
from areno.types import Batch, TrainSequence


class SFTTrainer(RowLoop[SupervisedExperimentConfig]):
    """Trains a model on demonstrations. Use as a context manager, or call close()."""

    needs, kind = SupervisedExperimentConfig, "sft"
    headline = ("train/loss", "train/lr")

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

    def measure(self, name: str, batches: Iterator[Batch[TrainSequence]]) -> dict[str, float]:
        """loss: mean negative log-likelihood of the response tokens of all rows."""
        rows, logprobs = [], []
        for batch in batches:
            rows += batch.items
            logprobs += self.setup.trainer.score_logprobs("actor", token_rows(batch.items), 1.0)
        return {"loss": measure_loss(self.setup.loss_fn, rows, logprobs)["loss"]}
