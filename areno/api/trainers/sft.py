"""The loop of supervised fine-tuning: encode rows, train on their responses."""

from __future__ import annotations

from collections.abc import Iterator

from areno.api.batches import sft_loader
from areno.api.loop import Stopwatch
from areno.api.row_run import RowRun
from areno.api.types import Batch
from areno.config.experiments import SFTConfig
from areno.engine.types import TrainSequence
from areno.loss_fns.sft import sft_loss_fn


class SFTTrainer(RowRun[TrainSequence]):
    """Trains a model on demonstrations."""

    config: SFTConfig
    kind = "sft"
    open_loader = staticmethod(sft_loader)

    def fit(self) -> float:
        """Run to the end. Returns the last evaluation loss or, without one, the training loss of the last step."""
        for _, batch in self.steps():
            watch = Stopwatch()
            stats = self.train(batch.items, sft_loss_fn, watch)
            self.end_step(batch, stats, watch, ("loss", "lr"))
        self.finish("loss")
        return (self.evaluated or self.trained)[-1]["loss"]

    def measure(self, batches: Iterator[Batch[TrainSequence]]) -> dict[str, float]:
        """loss: mean negative log-likelihood of the response tokens."""
        total, count = 0.0, 0
        for batch in batches:
            scored = self.trainer.score_logprobs("actor", [row.tokens or [] for row in batch.items], 1.0)
            for row, logprobs in zip(batch.items, scored, strict=True):
                placed = list(zip(logprobs, row.prompt_mask or [], strict=True))[1:]  # nothing predicts the first
                trained = [lp for lp, masked in placed if not masked]
                total -= sum(trained)
                count += len(trained)
        return {"loss": total / max(count, 1)}
