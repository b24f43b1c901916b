"""What a loop works with, opened from its configuration: the Trainer, the data, the rewards and the Run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areno.api.inputs.plan import TrainerPlan, experiment_roles, plan_of_experiment
from areno.api.trainer import Trainer
from areno.api.trainers.run import Run
from areno.config.experiments import CriticExperimentConfig, ExperimentConfig, PolicyExperimentConfig
from areno.config.run import DatasetConfig, GenerationConfig
from areno.data.loader import BatchLoader, row_loader
from areno.data.sources import open_rows, valid_section
from areno.errors import ConfigError
from areno.rewards.pool import RewardPool
from areno.tracking.run_log import RunLog
from areno.types import Batch, PromptItem, RewardRecord

RewardFn = Callable[[RewardRecord], Any]
Save = Callable[[Path], object]
Evaluate = Callable[[], dict[str, float]]


def check_config(config: Any, needed: type[ExperimentConfig], trainer: str) -> None:
    """ConfigError for a configuration that the named trainer cannot read."""
    if not isinstance(config, needed):
        raise ConfigError(f"config is a {type(config).__name__}; {trainer} needs a {needed.__name__}")
    if needed is PolicyExperimentConfig and isinstance(config, CriticExperimentConfig):
        raise ConfigError(f"{type(config).__name__} is for PPOTrainer, not for {trainer}: its critic would not be used")


@dataclass(kw_only=True)
class RowSetup:
    """For a loop that trains on given rows."""

    run: Run
    trainer: Trainer
    loader: BatchLoader[Any]
    valid_loader: BatchLoader[Any] | None
    resources: ExitStack

    def valid_batches(self) -> Iterator[Batch[Any]]:
        """All of valid_dataset."""
        assert self.valid_loader is not None
        return self.valid_loader.batches()

    def log_skipped(self, batch: Batch[Any]) -> None:
        """Tell the trackers how many rows were too long."""
        self.run.log(
            {"rollout/skipped_long": batch.skipped_long, "rollout/total_skipped_long": batch.total_skipped_long}
        )

    def close(self) -> None:
        """End the workers, close the logs."""
        self.resources.close()


def open_rows_setup(
    config: ExperimentConfig,
    kind: Literal["sft", "dpo"],
    run_dir: str | Path | None,
    train_dataset: Any,
    valid_dataset: Any,
    *,
    save: Save,
    evaluate: Evaluate,
    headline: tuple[str, ...],
) -> RowSetup:
    """Check everything, make the run's folder, load the model. kind: "sft" or "dpo"."""
    with ExitStack() as stack:
        stack.enter_context(RunLog())
        plan = plan_of_experiment(config)
        spec, tokenizer = plan.spec, plan.tokenizer

        def loader(section: DatasetConfig, given: Any, key: str) -> BatchLoader[Any]:
            rows, section = open_rows(section, given, kind, key)
            context_len, seed = spec.context_len, config.seed
            return row_loader(kind, rows, tokenizer, section, context_len=context_len, seed=seed, key=key)

        train_loader = loader(config.train_dataset, train_dataset, "train_dataset")
        valid = valid_section(config, valid_dataset)
        valid_loader = None if valid is None else loader(valid, valid_dataset, "valid_dataset")
        run = Run(
            config, run_dir, train_loader, save=save, evaluate=evaluate if valid_loader else None, headline=headline
        )
        stack.callback(run.close)
        trainer = stack.enter_context(Trainer.from_plan(plan, run.clock))
        trainer.init()
        return RowSetup(
            run=run, trainer=trainer, loader=train_loader, valid_loader=valid_loader, resources=stack.pop_all()
        )


@dataclass(kw_only=True)
class PolicySetup:
    """For a loop that samples completions and trains on them. rewards: None where a reward model is the only reward."""

    config: PolicyExperimentConfig
    run: Run
    trainer: Trainer
    tokenizer: Any
    valid_loader: BatchLoader[PromptItem] | None
    rewards: RewardPool | None
    resources: ExitStack

    @property
    def eval_gconfig(self) -> GenerationConfig:
        """How completions are sampled in evaluation."""
        return self.config.eval_gconfig or self.config.gconfig

    def close(self) -> None:
        """End the reward processes and the workers, close the logs."""
        self.resources.close()


def open_policy_setup(
    config: PolicyExperimentConfig,
    run_dir: str | Path | None,
    train_dataset: Any,
    valid_dataset: Any,
    reward_fn: RewardFn | None,
    *,
    save: Save,
    evaluate: Evaluate,
) -> PolicySetup:
    """Check everything, start the reward processes, make the run's folder, load the models."""
    with ExitStack() as stack:
        stack.enter_context(RunLog())
        rewards = None
        if reward_fn is not None or config.reward.fn is not None or config.reward.path is None:
            # It imports the user's file while the data is read.
            rewards = stack.enter_context(RewardPool(config.reward, reward_fn))
        plan = plan_of_experiment(config)
        roles = experiment_roles(config, plan.spec)
        train_loader, valid_loader = _prompt_loaders(config, plan, train_dataset, valid_dataset)
        if rewards is not None:
            rewards.wait_ready()
        run = Run(
            config,
            run_dir,
            train_loader,
            save=save,
            evaluate=evaluate if valid_loader else None,
            headline=("rollout/rewards_mean", "train/response_len", "train/explained_variance"),
        )
        stack.callback(run.close)
        trainer = stack.enter_context(Trainer.from_plan(plan, run.clock))
        trainer.init()
        trainer.ensure_roles(roles)
        return PolicySetup(
            config=config,
            run=run,
            trainer=trainer,
            tokenizer=plan.tokenizer,
            valid_loader=valid_loader,
            rewards=rewards,
            resources=stack.pop_all(),
        )


def _prompt_loaders(
    config: PolicyExperimentConfig, plan: TrainerPlan, train_dataset: Any, valid_dataset: Any
) -> tuple[BatchLoader[PromptItem], BatchLoader[PromptItem] | None]:
    """The prompts to train on, and those to evaluate on, if there are any."""

    def loader(section: DatasetConfig, given: Any, key: str, gconfig: GenerationConfig, gconfig_key: str) -> Any:
        rows, section = open_rows(section, given, "prompt", key)
        return row_loader(
            "prompt",
            rows,
            plan.tokenizer,
            section,
            context_len=gconfig.max_tokens or plan.spec.context_len,
            context_key=f"{gconfig_key}.max_tokens" if gconfig.max_tokens else "the model's context",
            enable_thinking=config.rollout.enable_thinking,
            seed=config.seed,
            key=key,
        )

    train = loader(config.train_dataset, train_dataset, "train_dataset", config.gconfig, "gconfig")
    valid = valid_section(config, valid_dataset)
    if valid is None:
        return train, None
    if config.eval_gconfig is None:
        return train, loader(valid, valid_dataset, "valid_dataset", config.gconfig, "gconfig")
    return train, loader(valid, valid_dataset, "valid_dataset", config.eval_gconfig, "eval_gconfig")
