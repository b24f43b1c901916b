"""What the loops that train on given rows stand on (SFT, DPO): rows to batches, the ends of a step and of a run.

The algorithm itself (what is trained on, what is measured) is in trainers/sft.py and trainers/dpo.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from areno.api.algorithms import check_config
from areno.api.batches import BatchLoader
from areno.api.build import open_model
from areno.api.console import log_stage, setup_logging
from areno.api.data import open_rows, valid_section
from areno.api.loop import Run, Stopwatch
from areno.api.row_forms import RowKind
from areno.api.trainer import Trainer
from areno.api.types import Batch, Item
from areno.config import run_folder
from areno.config.run import DatasetConfig
from areno.engine.types import TrainSequence

Self = TypeVar("Self", bound="RowRun[Any]")  # typing has it from Python 3.11 on


class RowRun(Generic[Item]):
    """A model and its rows, for one run of `config`. The loops are its subclasses.

    run_dir: where logs and checkpoints go; None is a new folder under cluster.fileroot. train_dataset, valid_dataset:
    rows that a script holds (a list of dictionaries, or anything with a length and indexing), in place of the
    configured paths. Construction checks what can be checked and loads the model. Use as a context manager, or call
    close().
    """

    kind: ClassVar[RowKind]
    open_loader: ClassVar[Callable[..., BatchLoader[Any]]]  # of rows of that kind

    def __init__(
        self, config: Any, run_dir: str | Path | None = None, *, train_dataset: Any = None, valid_dataset: Any = None
    ):
        check_config(config, self.kind)
        self.config = config
        setup_logging()
        spec, tokenizer = open_model(config)
        kind, open_loader = self.kind, type(self).open_loader

        def loader(dataset: DatasetConfig, rows: Any, key: str) -> BatchLoader[Item]:
            rows, dataset = open_rows(dataset, rows, kind, key)
            return open_loader(rows, tokenizer, dataset, context_len=spec.context_len, seed=config.seed, key=key)

        self.loader = loader(config.train_dataset, train_dataset, "train_dataset")
        self.valid_loader: BatchLoader[Item] | None = None
        if (valid := valid_section(config, valid_dataset)) is not None:
            self.valid_loader = loader(valid, valid_dataset, "valid_dataset")
        self.trained: list[dict[str, float]] = []  # train/* of each step so far
        self.evaluated: list[dict[str, float]] = []  # eval/* of each evaluation so far
        self.run = Run(config, run_folder.for_script(config) if run_dir is None else run_dir)
        try:
            self.trainer = Trainer.from_spec(spec, tokenizer, workers=config.engine.workers)
        except BaseException:
            self.run.close()
            raise

    def steps(self) -> Iterator[tuple[int, Batch[Item]]]:
        """(step, rows) of the run, an evaluation before the first if that is asked for."""
        if self.valid_loader is not None and self.config.evaluator.eval_before_train:
            self.evaluate()
        yield from self.run.steps(self.loader)

    def train(
        self, rows: Sequence[TrainSequence], loss_fn: Any, watch: Stopwatch, *, granularity: int = 1
    ) -> dict[str, float]:
        """Optimizer steps of the actor, at temperature 1."""
        with watch.phase("train"):
            log_stage("train_start")
            stats = self.trainer.train(
                rows,
                loss_fn,
                gradient_accumulation_steps=self.config.actor.gradient_accumulation_steps,
                mb_spec=self.config.actor.mb_spec,
                temperature=1.0,
                granularity=granularity,
            )
            log_stage("train_end")
        stats["tokens_per_second"] = sum(len(row.tokens or []) for row in rows) / watch.seconds["train"]
        return stats

    def end_step(
        self, batch: Batch[Item], stats: Mapping[str, float], watch: Stopwatch, headline: Sequence[str]
    ) -> None:
        """Log the step, with the statistics named in `headline` in its one line; save and evaluate where due."""
        self.trained.append(dict(stats))
        self.run.log(
            {"rollout/skipped_long": batch.skipped_long, "rollout/total_skipped_long": batch.total_skipped_long}
        )
        self.run.log_step(stats, watch, {name: stats[name] for name in headline})
        self.run.save_if_due(self.trainer.write_checkpoint)
        if self.run.evaluation_is_due() and self.valid_loader is not None:
            self.evaluate()

    def measure(self, batches: Iterator[Batch[Item]]) -> dict[str, float]:
        """The eval/* scalars, by name, of all batches of valid_dataset."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Measure the whole of valid_dataset; records and returns eval/* scalars by name."""
        assert self.valid_loader is not None
        scalars = self.measure(self.valid_loader.batches())
        self.run.log_evaluation(scalars, tuple(scalars))
        self.evaluated.append(scalars)
        return scalars

    def finish(self, *names: str) -> None:
        """Save and evaluate at the end, and say how what is named changed."""
        self.run.save_at_end(self.trainer.write_checkpoint)
        if self.valid_loader is not None and self.run.evaluated_step != self.run.step:
            self.evaluate()
        changes = {name: (self.trained[0][name], self.trained[-1][name]) for name in names}
        if len(self.evaluated) > 1:
            changes |= {f"eval_{name}": (self.evaluated[0][name], self.evaluated[-1][name]) for name in names}
        self.run.log_end(**changes)

    def close(self) -> None:
        """End the workers, close the logs."""
        self.trainer.close()
        self.run.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
