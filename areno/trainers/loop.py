"""The base classes of the training loops. They open a loop from a configuration, evaluate it and close it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from areno.config.experiments import ExperimentConfig, LossFn, ReferencedExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.loader import BatchLoader
from areno.data.row_schema import RowKind
from areno.errors import ConfigError, Problem
from areno.run.run import fault_tolerant
from areno.run.setup import Config, RewardFns, Setup
from areno.tracking.console import log_stage
from areno.tracking.tracker import Tracker
from areno.trainers.rollout import Rollout, evaluate_policy
from areno.trainers.rows import AdvantageFn, by_source, join_rows, prompt_masks, token_rows
from areno.types import TrainSequence

Self = TypeVar("Self", bound="TrainingLoop[Any]")  # typing has it from Python 3.11 on
PolicyConfig = TypeVar("PolicyConfig", bound=PolicyExperimentConfig)
ReferencedConfig = TypeVar("ReferencedConfig", bound=ReferencedExperimentConfig)

logger = logging.getLogger("areno")


class TrainingLoop(Generic[Config]):
    """Base class of a training loop with its models, data and outputs. Use it as a context manager, or call close().

    Attributes:
        needs: The configuration class that the loop reads.
        kind: The kind of dataset rows that the loop reads: "prompt", "sft", "dpo", "kto", "rw" or "prm".
        headline: Names of the metrics in the line that each step prints.
        also_saved: Roles, such as "critic", that a checkpoint saves in a folder of their own, in addition to the actor.
        trains: Whether the loop trains. False for an evaluation, which has no training rows and no optimizer.
        setup: Models, data and rewards.
        run: Steps, logs, checkpoints and the states to resume from.
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
        """Return the metrics of a validation set by name, without the prefix eval/."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Evaluate the model on valid_dataset, log the metrics as eval/*, and return them without the prefix."""
        return self.run.evaluate()

    def close(self) -> None:
        """End the processes of the run, and close its logs."""
        self.setup.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RowLoop(TrainingLoop[Config]):
    """Base class of loops that train on the rows of a dataset, without sampling.

    Args:
        config: Settings of the run.
        run_dir: Folder of logs and checkpoints. None makes a new one under cluster.fileroot.
        train_dataset: Rows, a list of dictionaries or any object with a length and indexing, that replace the
            configured ones.
        valid_dataset: Validation rows in the same form, or a mapping of set names to such rows.
        trackers: Further trackers that receive the metrics.
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

    def row_logprobs(self, role: str, rows: Sequence[TrainSequence]) -> list[list[float]]:
        """Compute the log-probabilities of the trained tokens of rows under the model of a role."""
        return self.setup.trainer.score_logprobs(role, token_rows(rows), 1.0, prompt_masks=prompt_masks(rows))


class AnswerLoop(RowLoop[Config]):
    """Base class of loops that train on the answers of a dataset, and that measure accuracy and margin of each step."""

    headline = ("train/loss", "train/accuracy", "train/margin")

    @fault_tolerant
    def fit(self) -> float:
        """Train for all steps of the run.

        Returns:
            The accuracy of the last evaluation. Without evaluation, the mean accuracy of the last 5 steps.
        """
        run = self.run
        self.prepare()
        for batch in run.steps():
            stats = self.train_step(batch.items)
            run.progress.append_to_history(**{name: stats[name] for name in ("accuracy", "margin") if name in stats})
            run.log_skipped(batch)
            run.end_step(stats)
        run.finish({"accuracy": 1, "margin": 1, "eval_accuracy": 1, "eval_margin": 1})
        return run.progress.result("eval_accuracy", "accuracy", 5)

    def prepare(self) -> None:
        """Compute numbers that the steps need. Called before the first step, and again after the loss of a worker."""

    def train_step(self, items: Sequence[Any]) -> dict[str, float]:
        """Train on a batch of dataset rows, and return the statistics of the step, with `accuracy` and `margin`."""
        raise NotImplementedError


class ReferencedLoop(AnswerLoop[ReferencedConfig]):
    """Base class of loops on answers that a reference model scores once, before training."""

    _has_reference = False

    def prepare(self) -> None:
        self.score_reference()

    def score_reference(self) -> None:
        """Compute the reference log-probabilities of everything that the run trains on. A second call does nothing.

        Call this before the first update. If ref.path is not set, the actor in its current state serves as the
        reference model, and no second model is loaded. If the loss uses no reference model, nothing is computed.
        """
        if self._has_reference:
            return
        self.clear_scores()
        if self.setup.config.needs_reference():
            role, trainer = "ref" if self.setup.roles else "actor", self.setup.trainer
            if self.setup.roles:
                trainer.ensure_roles(self.setup.roles)
            started = time.monotonic()
            log_stage("score_start", role="ref")
            scored = self.score_all(role)
            log_stage("score_end", role="ref")
            logger.info("reference log-probabilities: %s in %.1f s", scored, time.monotonic() - started)
            if self.setup.roles:
                trainer.release_role(role)
        self._has_reference = True  # not earlier: scoring begins again after the loss of a worker

    def clear_scores(self) -> None:
        raise NotImplementedError

    def score_all(self, role: str) -> str:
        """Compute the scores with the model of a role, and return what was scored, such as "12 pairs"."""
        raise NotImplementedError

    def n_batches(self) -> int | None:
        """Return the largest number of batches that the run trains on. None if only the number of epochs limits it."""
        config = self.setup.config
        limits = [config.total_train_steps]
        if config.total_train_n_seqs is not None:
            limits.append(-(-config.total_train_n_seqs // config.train_dataset.batch_size))
        return min((limit for limit in limits if limit is not None), default=None)

    def evaluate(self) -> dict[str, float]:
        if self.setup.valid_loaders:
            self.score_reference()  # with the loaded actor, before a resumed run loads its state into the actor
        return super().evaluate()


class RewardLoop(TrainingLoop[PolicyConfig]):
    """Base class of loops that sample completions and train on their rewards.

    Args:
        config: Settings of the run.
        loss_fn: Loss function (pack, logprobs) -> (loss, statistics), as in areno.loss_fns. None uses config.loss_fn().
        run_dir: Folder of logs, rollouts and checkpoints. None makes a new one under cluster.fileroot.
        advantage_fn: Computes advantages, see AdvantageFn. None uses config.advantages().
        train_dataset: Rows of prompts that replace the configured ones, as in RowLoop.
        valid_dataset: Validation rows that replace the configured ones, as in RowLoop.
        reward_fn: A reward function or a list of reward functions that replace reward.fn.
        trackers: Further trackers that receive the metrics.
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
        if advantage_fn is not None and config.agent.turn_credit != "outcome":
            text = "is {}, but the advantages are those of an advantage_fn; leave this out, and read row.turn_rewards"
            raise ConfigError(Problem("agent.turn_credit", text, config.agent.turn_credit))
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

    def advantages_of(self, rollout: Rollout, rows: Sequence[TrainSequence]) -> Any:
        """Return the advantages of the samples of a rollout, as `self.advantages` computes them for each source alone.

        For an algorithm with a critic, it is a tuple of advantages and returns.
        """
        whole, groups = join_rows(rows, rollout.rows_per_kept_sample), rollout.groups_of_kept_samples
        sources = [sample.item.source for sample in rollout.kept_samples]
        if len(set(sources)) == 1:
            return self.advantages(whole, groups)

        def of_source(indices: Sequence[int]) -> Sequence[Any]:
            found = self.advantages([whole[index] for index in indices], [groups[index] for index in indices])
            return list(zip(*found, strict=True)) if isinstance(found, tuple) else found

        found = by_source(sources, of_source)
        return tuple(map(list, zip(*found, strict=True))) if isinstance(found[0], tuple) else found

    def measure(self, name: str, loader: BatchLoader[Any]) -> dict[str, float]:
        return evaluate_policy(self.setup, name, loader)


class PolicyEvaluation(RewardLoop[PolicyExperimentConfig]):
    """Evaluates a policy without training, for the command `areno evaluate`. Call `evaluate` to run it."""

    needs = PolicyExperimentConfig
    trains = False

    def __init__(self, config: PolicyExperimentConfig, run_dir: str | Path):
        super().__init__(config, _no_loss, run_dir)

    def measure(self, name: str, loader: BatchLoader[Any]) -> dict[str, float]:
        return evaluate_policy(self.setup, name, loader, may_fail=False)


def _no_loss(*_: Any) -> Any:
    raise AssertionError("an evaluation does not train")
