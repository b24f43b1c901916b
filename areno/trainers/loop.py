"""The base classes of the training loops: how a loop is opened from a configuration, measured and closed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from areno.config.experiments import ExperimentConfig, LossFn, PolicyExperimentConfig
from areno.data.loader import BatchLoader
from areno.data.row_schema import RowKind
from areno.run.setup import Config, RewardFns, Setup
from areno.tracking.tracker import Tracker
from areno.trainers.collect import evaluate_policy
from areno.trainers.rows import AdvantageFn

Self = TypeVar("Self", bound="Loop[Any]")  # typing has it from Python 3.11 on
PolicyConfig = TypeVar("PolicyConfig", bound=PolicyExperimentConfig)


class Loop(Generic[Config]):
    """A training loop with its models, data and run. Use it as a context manager, or call close().

    Attributes:
        needs: The configuration class that it reads.
        kind: The kind of its rows.
        headline: Scalars of the line that each step prints.
        also_saved: Roles that a checkpoint has a folder of, beside the files of the actor.
        trains: False for an evaluation, which has no training rows and no optimizer.
        setup: Models, data and rewards.
        run: Steps, logs, checkpoints and states.
    """

    needs: ClassVar[type[ExperimentConfig]]
    kind: ClassVar[RowKind]
    headline: ClassVar[tuple[str, ...]] = ()
    also_saved: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[bool] = True

    def __init__(self, config: Config, **given: Any):
        self.setup: Setup[Config] = Setup(self, config, **given)
        self.run = self.setup.run

    def measure(self, name: str, loader: BatchLoader[Any]) -> dict[str, float]:
        """Return the metrics of the validation set `name`."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Measure valid_dataset and log the metrics as eval/*.

        Returns:
            The metrics by name. Empty without valid_dataset.
        """
        return self.run.evaluate()

    def close(self) -> None:
        """End the processes of the run, and close its logs."""
        self.setup.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RowLoop(Loop[Config]):
    """A loop that trains on the rows of a dataset.

    Args:
        config: Settings of the run.
        run_dir: Folder of logs and checkpoints. None makes a new one under cluster.fileroot.
        train_dataset: Training rows of a script (a list of dictionaries, or any object with a length and indexing), in
            place of the configured path.
        valid_dataset: Validation rows, likewise.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path | None = None,
        *,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        trackers: Sequence[Tracker] = (),
    ):
        rows = {"train_dataset": train_dataset, "valid_dataset": valid_dataset}
        super().__init__(config, run_dir=run_dir, trackers=trackers, **rows)


class RewardLoop(Loop[PolicyConfig]):
    """A loop that samples completions and trains on their rewards.

    Args:
        config: Settings of the run.
        loss_fn: (pack, logprobs) -> (loss, stats), see areno.loss_fns. None takes config.loss_fn().
        run_dir: Folder of logs, rollouts and checkpoints. None makes a new one under cluster.fileroot.
        advantage_fn: Computes advantages, see AdvantageFn. None takes config.advantages().
        train_dataset: Training rows of a script, in place of the configured path.
        valid_dataset: Validation rows, likewise.
        reward_fn: A reward function or a list of them, in place of reward.fn.
    """

    kind = "prompt"

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
        super().__init__(
            config,
            loss_fn=loss_fn,
            run_dir=run_dir,
            train_dataset=train_dataset,
            valid_dataset=valid_dataset,
            reward_fn=reward_fn,
            trackers=trackers,
        )
        self.advantages = config.advantages
        if advantage_fn is not None:
            self.advantages = lambda rows, groups: advantage_fn(rows, groups, config.actor)

    def measure(self, name: str, loader: BatchLoader[Any]) -> dict[str, float]:
        """Sample and score the validation set `name`, and return its metrics."""
        return evaluate_policy(self.setup, name, loader)


class PolicyEvaluation(RewardLoop[PolicyExperimentConfig]):
    """Evaluates a policy without training: `areno evaluate`. Call `evaluate`."""

    needs = PolicyExperimentConfig
    trains = False

    def __init__(self, config: PolicyExperimentConfig, run_dir: str | Path):
        super().__init__(config, _no_loss, run_dir)


def _no_loss(*_: Any) -> Any:
    """Stand for the loss of an evaluation, whose algorithm may define its loss outside of the configuration."""
    raise AssertionError("an evaluation does not train")
