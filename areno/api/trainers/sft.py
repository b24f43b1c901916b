"""The loop of supervised fine-tuning: encode rows, train on their responses."""

from __future__ import annotations

from pathlib import Path

from areno.api.batches import BatchLoader, sft_loader
from areno.api.build import open_model
from areno.api.console import log_stage, setup_logging
from areno.api.data import load_rows
from areno.api.loop import Run, Stopwatch
from areno.api.trainer import Trainer
from areno.config.experiments import SFTConfig
from areno.config.run import DatasetConfig
from areno.engine.types import TrainSequence
from areno.loss_fns.sft import sft_loss_fn


class SFTTrainer:
    """Trains a model on demonstrations. Use as a context manager, or call close()."""

    def __init__(self, config: SFTConfig, run_dir: Path):
        self.config = config
        setup_logging()
        spec, tokenizer = open_model(config)

        def loader(dataset: DatasetConfig, key: str) -> BatchLoader[TrainSequence]:
            rows = load_rows(dataset, "sft", key)
            return sft_loader(rows, tokenizer, dataset, context_len=spec.context_len, seed=config.seed, key=key)

        self.loader = loader(config.train_dataset, "train_dataset")
        self.valid_loader = loader(config.valid_dataset, "valid_dataset") if config.valid_dataset else None
        self.eval_losses: list[float] = []  # of each evaluation so far
        self.run = Run(config, run_dir)
        try:
            self.trainer = Trainer(spec, workers=config.engine.workers)
        except BaseException:
            self.run.close()
            raise

    def fit(self) -> float:
        """Run to the end. Returns the last evaluation loss or, without one, the training loss of the last step."""
        config, run, trainer = self.config, self.run, self.trainer
        losses: list[float] = []
        if self.valid_loader is not None and config.evaluator.eval_before_train:
            self.evaluate()
        for step, batch in run.steps(self.loader):
            watch = Stopwatch()
            with watch.phase("train"):
                log_stage("train_start")
                stats = trainer.train(
                    batch.items,
                    sft_loss_fn,
                    gradient_accumulation_steps=config.actor.gradient_accumulation_steps,
                    seed=config.seed * 1_000_003 + step,
                )
                log_stage("train_end")
            stats["tokens_per_second"] = sum(len(row.tokens or []) for row in batch.items) / watch.seconds["train"]
            losses.append(stats["loss"])
            run.log({"rollout/skipped_long": batch.skipped_long})
            run.log_step(stats, watch, {"loss": losses[-1], "lr": stats["lr"]})
            run.save_if_due(trainer.save_checkpoint)
            if run.evaluation_is_due() and self.valid_loader is not None:
                self.evaluate()
        run.save_at_end(trainer.save_checkpoint)
        changes = {"loss": (losses[0], losses[-1])}
        if self.valid_loader is not None:
            if run.evaluated_step != run.step:
                self.evaluate()
            if len(self.eval_losses) > 1:
                changes["eval_loss"] = (self.eval_losses[0], self.eval_losses[-1])
        run.log_end(**changes)
        return self.eval_losses[-1] if self.eval_losses else losses[-1]

    def evaluate(self) -> float:
        """Mean negative log-likelihood of the response tokens of valid_dataset."""
        assert self.valid_loader is not None
        total, count = 0.0, 0
        for batch in self.valid_loader.batches():
            scored = self.trainer.score_logprobs("actor", [row.tokens or [] for row in batch.items])
            for row, logprobs in zip(batch.items, scored, strict=True):
                trained = [lp for lp, masked in zip(logprobs, row.prompt_mask or [], strict=True) if not masked]
                total -= sum(trained)
                count += len(trained)
        loss = total / max(count, 1)
        self.run.log_evaluation({"loss": loss}, ("loss",))
        self.eval_losses.append(loss)
        return loss

    def close(self) -> None:
        """End the workers, close the logs."""
        self.trainer.close()
        self.run.close()

    def __enter__(self) -> SFTTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
