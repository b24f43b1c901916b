"""What a training loop works with, opened from its configuration and closed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from areno.api.inputs.plan import TrainerPlan, experiment_roles, plan_of_experiment
from areno.api.trainer import Trainer
from areno.api.trainers.evaluator import Evaluator
from areno.api.trainers.run import Run
from areno.checkpoint.inputs import folder_fingerprint, rows_fingerprint
from areno.config.datasets import DatasetConfig
from areno.config.experiments import CriticExperimentConfig, ExperimentConfig, LossFn, PolicyExperimentConfig
from areno.data.loader import BatchLoader, row_loader
from areno.data.row_schema import RowKind
from areno.data.sources import check_source, check_valid_sources, open_rows, valid_sets
from areno.errors import ConfigError, all_of
from areno.rewards.pool import RewardPool
from areno.tracking.run_log import RunLog
from areno.types import RewardRecord

RewardFn = Callable[[RewardRecord], Any]
Config = TypeVar("Config", bound=ExperimentConfig, covariant=True)


class Setup(Generic[Config]):
    """Models, data, rewards and the run of one experiment. Construction checks everything and makes the run's folder.

    trainer_name, needed: the loop, and the configuration that it reads. headline: see open_trackers. measure: (setup,
    name of a validation set, its loader) -> its metrics by name. also_saved: roles that a checkpoint has a folder of
    beside the actor's files. The other arguments are those of the loops.
    roles: the models beside the actor. rewards: the reward processes; None where a reward model is the only reward, or
    where rows are given.
    """

    def __init__(
        self,
        config: Config,
        trainer_name: str,
        needed: type[ExperimentConfig],
        kind: RowKind,
        headline: tuple[str, ...],
        measure: Callable[[Any, str, BatchLoader[Any]], dict[str, float]],
        *,
        loss_fn: LossFn | None = None,
        run_dir: str | Path | None = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        reward_fn: RewardFn | None = None,
        also_saved: Sequence[str] = (),
    ):
        given = type(config).__name__
        if not isinstance(config, needed):
            raise ConfigError(f"config is a {given}; {trainer_name} needs a {needed.__name__}")
        if needed is PolicyExperimentConfig and isinstance(config, CriticExperimentConfig):
            raise ConfigError(f"{given} is for PPOTrainer, not for {trainer_name}: its critic would not be used")
        self.config: Config = config
        self.loss_fn = config.loss_fn() if loss_fn is None else loss_fn
        self._kind: RowKind = kind
        self._also_saved = also_saved
        with ExitStack() as stack:
            stack.enter_context(RunLog())
            self.rewards, plan, roles, *_ = all_of(
                lambda: self._open_rewards(stack, reward_fn),
                lambda: plan_of_experiment(config),
                lambda: experiment_roles(config),
                lambda: train_dataset is not None or check_source(config.train_dataset, "train_dataset"),
                lambda: valid_dataset is not None or check_valid_sources(config.valid_dataset),
            )
            self.tokenizer = plan.tokenizer
            self.roles = {name: replace(role, path=role.path or plan.spec.model_path) for name, role in roles.items()}
            self.loader = self._open_loader(plan, config.train_dataset, train_dataset, "train_dataset")
            self.valid_loaders = {
                valid.name: self._open_loader(plan, valid.config, valid.rows, valid.key)
                for valid in valid_sets(config, valid_dataset)
            }
            evaluator = Evaluator(config, self.valid_loaders, partial(measure, self))
            if self.rewards is not None:
                self.rewards.wait_ready()
            self.run = Run(
                config, run_dir, self.loader, save=self._write_checkpoint,
                is_saved=lambda: self.trainer.checkpoint_written(),
                evaluator=evaluator, headline=headline, reward=self._reward_name(),
                engine=lambda: self.trainer.engine, inputs=self._inputs(plan),
            )  # fmt: skip
            stack.callback(self.run.close)
            self.trainer = stack.enter_context(Trainer.from_plan(plan, self.run.clock))
            self.trainer.init()
            if isinstance(config, PolicyExperimentConfig):
                self.trainer.ensure_roles(self.roles)
            self._resources = stack.pop_all()

    def _open_rewards(self, stack: ExitStack, reward_fn: RewardFn | None) -> RewardPool | None:
        """Start the reward processes, which import the user's file while the data is read. None without a function."""
        config = self.config
        if not isinstance(config, PolicyExperimentConfig):
            return None
        if reward_fn is None and config.reward.fn is None and config.reward.path is not None:
            return None
        return stack.enter_context(RewardPool(config.reward, reward_fn))

    def _reward_name(self) -> str:
        """The function and the model that give the rewards."""
        path = self.config.reward.path if isinstance(self.config, PolicyExperimentConfig) else None
        return " plus ".join(name for name in (self.rewards and self.rewards.name, path) if name)

    def _open_loader(self, plan: TrainerPlan, section: DatasetConfig, given: Any, key: str) -> BatchLoader[Any]:
        """The rows of a section, or those `given` by a script, as batches. key: the section, for messages."""
        config, limit, limit_key, thinking = self.config, plan.spec.context_len, "the model's context", None
        rows, section = open_rows(section, given, self._kind, key)
        if isinstance(config, PolicyExperimentConfig):
            thinking, name, gconfig = config.rollout.enable_thinking, "gconfig", config.gconfig
            if key != "train_dataset" and config.eval_gconfig is not None:
                name, gconfig = "eval_gconfig", config.eval_gconfig
            if gconfig.max_tokens:
                limit, limit_key = gconfig.max_tokens, f"{name}.max_tokens"
        return row_loader(
            self._kind, rows, plan.tokenizer, section, context_len=limit, context_key=limit_key,
            enable_thinking=thinking, seed=config.seed, key=key,
        )  # fmt: skip

    def _inputs(self, plan: TrainerPlan) -> dict[str, str]:
        """Fingerprints of the models and the data, which a run that goes on must have, too."""
        models = {"actor.path": plan.spec.model_path, "tokenizer_path": plan.spec.tokenizer_path}
        models |= {role.key: role.path for role in self.roles.values() if role.optimizer is None}
        found = {key: folder_fingerprint(path) for key, path in models.items()}
        return found | {"train_dataset": rows_fingerprint(self.loader.rows)}

    def _write_checkpoint(self, folder: Path) -> None:
        background = self.config.saver.mode == "async"
        self.trainer.write_checkpoint(folder, background=background)
        for role in self._also_saved:
            self.trainer.write_checkpoint(folder / role, role, background)

    def close(self) -> None:
        """End the reward processes and the workers, close the logs."""
        self._resources.close()


PolicySetup = Setup[PolicyExperimentConfig]
