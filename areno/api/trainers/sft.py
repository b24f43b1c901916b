"""The loop of supervised fine-tuning: encode rows, train on their responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areno.api.batches import sft_loader
from areno.api.loop import Stopwatch
from areno.api.row_run import RowRun
from areno.api.types import Batch
from areno.config.experiments import SFTConfig
from areno.engine.types import TrainSequence
from areno.loss_fns.sft import sft_loss_fn


class SFTTrainer:
    """Trains a model on demonstrations.

    run_dir, train_dataset and valid_dataset are those of RowRun. Use as a context manager, or call close().
    """

    def __init__(
        self, config: SFTConfig, run_dir: Path | None = None, *, train_dataset: Any = None, valid_dataset: Any = None
    ):
        self.data = RowRun(
            config, run_dir, "sft", sft_loader, self._measure, train_dataset=train_dataset, valid_dataset=valid_dataset
        )
        self.trainer = self.data.trainer

    def fit(self) -> float:
        """Run to the end. Returns the last evaluation loss or, without one, the training loss of the last step."""
        data = self.data
        for _, batch in data.steps():
            watch = Stopwatch()
            stats = data.train(batch.items, sft_loss_fn, watch)
            data.end_step(batch, stats, watch, ("loss", "lr"))
        data.finish("loss")
        return (data.evaluated or data.trained)[-1]["loss"]

    def evaluate(self) -> dict[str, float]:
        """loss: mean negative log-likelihood of the response tokens of valid_dataset. Recorded as eval/loss."""
        return self.data.evaluate()

    def _measure(self, batches: Iterator[Batch[TrainSequence]]) -> dict[str, float]:
        total, count = 0.0, 0
        for batch in batches:
            scored = self.trainer.score_logprobs("actor", [row.tokens or [] for row in batch.items], 1.0)
            for row, logprobs in zip(batch.items, scored, strict=True):
                trained = [lp for lp, masked in zip(logprobs, row.prompt_mask or [], strict=True) if not masked]
                total -= sum(trained)
                count += len(trained)
        return {"loss": total / max(count, 1)}

    def close(self) -> None:
        """End the workers, close the logs."""
        self.data.close()

    def __enter__(self) -> SFTTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
