"""What a training loop works with, opened from its configuration and closed together. The loops add how they train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

from areno.api.inputs.plan import TrainerPlan, experiment_roles, plan_of_experiment
from areno.api.trainer import Trainer
from areno.api.trainers.run import Run
from areno.config.experiments import CriticExperimentConfig, ExperimentConfig, LossFn, PolicyExperimentConfig
from areno.config.run import DatasetConfig
from areno.data.loader import BatchLoader, prompt_loader, train_row_loader
from areno.data.row_schema import RowKind
from areno.data.sources import open_rows, valid_section
from areno.errors import ConfigError
from areno.rewards.pool import RewardPool
from areno.tracking.run_log import RunLog
from areno.types import Batch, RewardRecord

RewardFn = Callable[[RewardRecord], Any]
Config = TypeVar("Config", bound=ExperimentConfig)
Self = TypeVar("Self", bound="Loop[Any]")  # typing has it from Python 3.11 on


def check_config(config: Any, needed: type[ExperimentConfig], trainer: str) -> None:
    """ConfigError for a configuration that the named trainer cannot read."""
    if not isinstance(config, needed):
        raise ConfigError(f"config is a {type(config).__name__}; {trainer} needs a {needed.__name__}")
    if needed is PolicyExperimentConfig and isinstance(config, CriticExperimentConfig):
        raise ConfigError(f"{type(config).__name__} is for PPOTrainer, not for {trainer}: its critic would not be used")


class Loop(Generic[Config]):
    """A run that is ready to train. Construction checks everything, makes the run's folder and loads the models.

    kind: of the rows. evaluate: measures valid_dataset. headline: see open_trackers. The rest are the arguments of the
    loops. rewards: the reward processes; None where a reward model is the only reward, or where rows are given.
    """

    loss_fn: LossFn

    def __init__(
        self,
        config: Config,
        kind: RowKind,
        run_dir: str | Path | None,
        train_dataset: Any,
        valid_dataset: Any,
        reward_fn: RewardFn | None = None,
        *,
        evaluate: Callable[[], dict[str, float]],
        headline: tuple[str, ...],
    ):
        self.config = config
        with ExitStack() as stack:
            stack.enter_context(RunLog())
            self.rewards = None
            if isinstance(config, PolicyExperimentConfig) and (
                reward_fn is not None or config.reward.fn is not None or config.reward.path is None
            ):
                # It imports the user's file while the data is read.
                self.rewards = stack.enter_context(RewardPool(config.reward, reward_fn))
            plan = plan_of_experiment(config)
            self.tokenizer = plan.tokenizer
            roles = experiment_roles(config, plan.spec)
            self.loader = _loader(config, plan, kind, config.train_dataset, train_dataset, "train_dataset")
            self.valid_loader = None
            if (valid := valid_section(config, valid_dataset)) is not None:
                self.valid_loader = _loader(config, plan, kind, valid, valid_dataset, "valid_dataset")
            if self.rewards is not None:
                self.rewards.wait_ready()
            measure = evaluate if self.valid_loader else None
            self.run = Run(
                config, run_dir, self.loader, save=self.write_checkpoint, evaluate=measure, headline=headline
            )
            stack.callback(self.run.close)
            self.trainer = stack.enter_context(Trainer.from_plan(plan, self.run.clock))
            self.trainer.init()
            if roles:
                self.trainer.ensure_roles(roles)
            self._resources = stack.pop_all()

    def valid_batches(self) -> Iterator[Batch[Any]]:
        """All of valid_dataset."""
        assert self.valid_loader is not None
        return self.valid_loader.batches()

    def evaluate(self) -> dict[str, float]:
        """Measure the whole of valid_dataset; records and returns eval/* scalars by name."""
        return self.run.evaluate()

    def write_checkpoint(self, folder: Path) -> None:
        """Fill the folder of a checkpoint with the policy."""
        self.trainer.write_checkpoint(folder)

    def close(self) -> None:
        """End the reward processes and the workers, close the logs."""
        self._resources.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


PolicyLoop = Loop[PolicyExperimentConfig]


def _loader(
    config: ExperimentConfig, plan: TrainerPlan, kind: RowKind, section: DatasetConfig, given: Any, key: str
) -> BatchLoader[Any]:
    """The rows of a section, or those `given` by a script, as batches. key: the section, for messages."""
    rows, section = open_rows(section, given, kind, key)
    context_len, seed = plan.spec.context_len, config.seed
    if kind != "prompt":
        return train_row_loader(kind, rows, plan.tokenizer, section, context_len=context_len, seed=seed, key=key)
    assert isinstance(config, PolicyExperimentConfig)
    name, gconfig = "gconfig", config.gconfig
    if key == "valid_dataset" and config.eval_gconfig is not None:
        name, gconfig = "eval_gconfig", config.eval_gconfig
    return prompt_loader(
        rows,
        plan.tokenizer,
        section,
        context_len=gconfig.max_tokens or context_len,
        context_key=f"{name}.max_tokens" if gconfig.max_tokens else "the model's context",
        enable_thinking=config.rollout.enable_thinking,
        seed=seed,
        key=key,
    )
