"""The training loop of supervised fine-tuning: train on the responses of the rows."""

from __future__ import annotations

from areno.config.experiments import SupervisedExperimentConfig
from areno.data.loader import BatchLoader
from areno.run.run import fault_tolerant
from areno.trainers.loop import RowLoop
from areno.trainers.rows import token_rows
from areno.trainers.update import measure_loss, update
from areno.types import TrainSequence


class SFTTrainer(RowLoop[SupervisedExperimentConfig]):
    """Trains a model on demonstrations. Use it as a context manager, or call close()."""

    needs, kind = SupervisedExperimentConfig, "sft"
    headline = ("train/loss", "train/lr")

    @fault_tolerant
    def fit(self) -> float:
        """Train until the end of the run.

        Returns:
            The loss of the last evaluation. Without evaluation, the training loss of the last step.
        """
        run = self.run
        for batch in run.steps():
            stats = update(self.setup, batch.items)
            run.progress.keep(loss=stats["loss"])
            run.log_skipped(batch)
            run.end_step(stats)
        run.finish({"loss": 1, "eval_loss": 1})
        return run.progress.result("eval_loss", "loss")

    def measure(self, name: str, loader: BatchLoader[TrainSequence]) -> dict[str, float]:
        """Return the mean negative log-likelihood of the response tokens of a validation set, as "loss"."""
        rows, logprobs = [], []
        for batch in loader.batches():
            rows += batch.items
            logprobs += self.setup.trainer.score_logprobs("actor", token_rows(batch.items), 1.0)
        return {"loss": measure_loss(self.setup.loss_fn, rows, logprobs)["loss"]}
