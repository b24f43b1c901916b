"""The training loop of supervised fine-tuning, which trains on the responses of dataset rows."""

from __future__ import annotations

from areno.config.experiments import SupervisedExperimentConfig
from areno.data.loader import BatchLoader
from areno.run.run import fault_tolerant
from areno.trainers.loop import RowLoop
from areno.trainers.rows import prompt_masks, token_rows
from areno.trainers.update import measure_loss, update
from areno.types import TrainSequence


class SFTTrainer(RowLoop[SupervisedExperimentConfig]):
    """Trains a model on demonstrations by supervised fine-tuning. Use it as a context manager, or call close()."""

    needs, kind = SupervisedExperimentConfig, "sft"
    headline = ("train/loss", "train/lr")

    @fault_tolerant
    def fit(self) -> float:
        """Train for all steps of the run.

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
        """Compute the negative log-likelihood of a validation set.

        Args:
            name: Name of the validation set. Not used.
            loader: Loader of the rows of the set.

        Returns:
            {"loss": mean negative log-likelihood over all trained tokens of the set}.
        """
        rows, logprobs = [], []
        for batch in loader.batches():
            rows += batch.items
            logprobs += self.setup.trainer.score_logprobs(
                "actor", token_rows(batch.items), 1.0, prompt_masks=prompt_masks(batch.items)
            )
        return {"loss": measure_loss(self.setup.loss_fn, rows, logprobs)["loss"]}
