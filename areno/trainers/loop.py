"""What a training loop is beside its algorithm: how it is made of a configuration, measured and closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from areno.config.experiments import ExperimentConfig, LossFn, PolicyExperimentConfig
from areno.data.row_schema import RowKind
from areno.run.setup import Config, RewardFns, Setup
from areno.tracking.tracker import Tracker
from areno.trainers.collect import evaluate_policy
from areno.trainers.rows import AdvantageFn
from areno.types import Batch

Self = TypeVar("Self", bound="Loop[Any]")  # typing has it from Python 3.11 on
PolicyConfig = TypeVar("PolicyConfig", bound=PolicyExperimentConfig)


class Loop(Generic[Config]):
    """Every loop.

    needs: the configuration that it reads. headline: see open_trackers.
    """

    needs: ClassVar[type[ExperimentConfig]]
    headline: ClassVar[tuple[str, ...]]

    def __init__(self, setup: Setup[Config]):
        self.setup = setup
        self.run = setup.run

    def evaluate(self) -> dict[str, float]:
        """Measure the whole of valid_dataset; records and returns eval/* scalars by name."""
        return self.run.evaluate()

    def close(self) -> None:
        """End the processes of the run, and close its logs."""
        self.setup.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RowLoop(Loop[Config]):
    """A loop that trains on rows as they are."""

    kind: ClassVar[RowKind]

    def __init__(
        self,
        config: Config,
        run_dir: str | Path | None = None,
        *,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        trackers: Sequence[Tracker] = (),
    ):
        """Checks what can be checked and loads the model.

        run_dir: where logs and checkpoints go; None is a new folder under cluster.fileroot.
        train_dataset, valid_dataset: rows of a script (a list of dictionaries, or anything with a length and indexing),
        in place of the configured paths.
        trackers: trackers of the script, which get all scalars and samples of the run.
        """
        super().__init__(
            Setup(
                config, type(self).__name__, self.needs, self.kind, self.headline,
                lambda _, name, loader: self.measure(name, loader.batches()),
                run_dir=run_dir, train_dataset=train_dataset, valid_dataset=valid_dataset, trackers=trackers,
            )
        )  # fmt: skip

    def measure(self, name: str, batches: Iterator[Batch[Any]]) -> dict[str, float]:
        """Metrics over all rows of the validation set `name`."""
        raise NotImplementedError


class RewardLoop(Loop[PolicyConfig]):
    """A loop that samples, and trains on what the samples earned.

    also_saved: roles that a checkpoint has a folder of, beside the actor's files.
    """

    also_saved: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: PolicyConfig,
        loss_fn: LossFn | None = None,
        run_dir: str | Path | None = None,
        *,
        advantage_fn: AdvantageFn | None = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        reward_fn: RewardFns | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        """Checks what can be checked, starts the reward processes and loads the models.

        loss_fn: (pack, logprobs) -> (loss, stats), see areno.loss_fns; None is the one that config describes.
        run_dir: where logs, rollouts and checkpoints go; None is a new folder under cluster.fileroot.
        advantage_fn: see AdvantageFn; None is the one that config describes.
        train_dataset, valid_dataset: rows of a script, in place of the configured paths.
        reward_fn: a function or a list of them, in place of reward.fn.
        trackers: trackers of the script, which get all scalars and samples of the run.
        """
        super().__init__(
            Setup(
                config, type(self).__name__, self.needs, "prompt", self.headline, evaluate_policy,
                loss_fn=loss_fn, run_dir=run_dir, train_dataset=train_dataset, valid_dataset=valid_dataset,
                reward_fn=reward_fn, trackers=trackers, also_saved=self.also_saved,
            )
        )  # fmt: skip
        self.advantages = config.advantages
        if advantage_fn is not None:
            self.advantages = lambda rows, groups: advantage_fn(rows, groups, config.actor)
