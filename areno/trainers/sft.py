"""The training loop of supervised fine-tuning, which trains on the responses of dataset rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from areno.config.experiments import SupervisedExperimentConfig
from areno.data.loader import BatchLoader
from areno.run.run import fault_tolerant
from areno.trainers.loop import RowLoop
from areno.trainers.update import measure_loss, update_actor
from areno.types import AnswersItem, Batch, TrainSequence

logger = logging.getLogger("areno")


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
        run, split = self.run, _SplitRowCounter()
        for batch in run.steps():
            stats = update_actor(self.setup, sequences_of(batch.items))
            run.progress.append_to_history(loss=stats["loss"])
            run.log_skipped(batch)
            split.count(batch)
            run.end_step(stats)
        split.log()
        run.finish({"loss": 1, "eval_loss": 1})
        return run.progress.result("eval_loss", "loss")

    def measure(self, name: str, loader: BatchLoader[AnswersItem]) -> dict[str, float]:
        """Return {"loss": mean negative log-likelihood over all trained tokens of the set}."""
        rows, logprobs = [], []
        for batch in loader.batches():
            found = sequences_of(batch.items)
            rows += found
            logprobs += self.row_logprobs("actor", found)
        return {"loss": measure_loss(self.setup.loss_fn, rows, logprobs)["loss"]}


@dataclass
class _SplitRowCounter:
    n_rows: int = 0
    n_split: int = 0
    n_sequences: int = 0
    n_added: int = 0
    is_known: bool = False

    def count(self, batch: Batch[AnswersItem]) -> None:
        self.n_rows += len(batch)
        for item in batch.items:
            lengths = [len(sequence.tokens) for sequence in item.rows]  # type: ignore[arg-type]
            if len(lengths) > 1:
                self.n_split += 1
                self.n_sequences += len(lengths)
                self.n_added += sum(lengths) - max(lengths)
        if batch.ends_epoch or not self.is_known:
            self.log()

    def log(self) -> None:
        if not self.n_split:
            return
        text = "%d of %d rows became %d sequences, one for each turn of the assistant, which adds %d tokens: the chat "
        text += "template renders a turn differently once more messages follow; see train_dataset.changed_turns"
        logger.info(text, self.n_split, self.n_rows, self.n_sequences, self.n_added)
        vars(self).update(vars(_SplitRowCounter(is_known=True)))


def sequences_of(items: Sequence[AnswersItem]) -> list[TrainSequence]:
    return [sequence for item in items for sequence in item.rows]
