"""What stands around every training loop: a lost worker does not end it, and whatever ends it leaves a state.

What a training loop works with, opened from its configuration and closed together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from areno.agents.pool import AgentPool
from areno.api.trainer import Trainer
from areno.config.datasets import DatasetConfig
from areno.config.experiments import CriticExperimentConfig, ExperimentConfig, LossFn, PolicyExperimentConfig
from areno.data.loader import BatchLoader, row_loader
from areno.data.row_schema import RowKind
from areno.data.sources import check_source, check_valid_sources, open_rows, valid_sets
from areno.engine.spec import RoleSpec
from areno.errors import ConfigError, WorkerLost, all_of, keys_renamed
from areno.plan.devices import n_workers_here
from areno.plan.facts import facts, without_answers
from areno.plan.plan import TrainerPlan, check_copies, experiment_roles, plan_of_experiment
from areno.plan.schedule import schedule_warnings, with_schedules
from areno.rewards.pool import RewardPool
from areno.run.evaluator import Evaluator
from areno.run.run import Run
from areno.run.states import folder_fingerprint, rows_fingerprint
from areno.tracking.recorder import check_services
from areno.tracking.run_log import RunLog
from areno.tracking.tracker import Tracker
from areno.types import RewardRecord

Loop = TypeVar("Loop", bound="HasRun")


class AttendedRun(Protocol):
    """See Run."""

    def attended(self) -> AbstractContextManager[None]: ...

    @property
    def may_restart(self) -> bool: ...

    def give_up(self, lost: WorkerLost) -> NoReturn: ...

    def restart(self, lost: WorkerLost) -> None: ...

    def has_result(self, result: float) -> None: ...


class HasRun(Protocol):
    """A loop with its run."""

    @property
    def run(self) -> AttendedRun: ...


def attended(fit: Callable[[Loop], float]) -> Callable[[Loop], float]:
    """Marks the method that runs a loop to its end; its result is that of the run. See Run.attended."""

    @functools.wraps(fit)
    def attended_fit(loop: Loop) -> float:
        with loop.run.attended():
            lost: WorkerLost | None = None
            while True:
                try:
                    if lost is not None:
                        loop.run.restart(lost)  # in which the next one may be lost
                    result = fit(loop)
                    break
                except WorkerLost as error:
                    if not loop.run.may_restart:
                        loop.run.give_up(error)
                    lost = error
        loop.run.has_result(result)
        return result

    return attended_fit


logger = logging.getLogger("areno")

RewardFn = Callable[[RewardRecord], Any]
RewardFns = RewardFn | Sequence[RewardFn]  # of several, the reward is the sum with reward.weights
Config = TypeVar("Config", bound=ExperimentConfig, covariant=True)


class Setup(Generic[Config]):
    """Models, data, rewards and the run of one experiment. Construction checks everything and makes the run's folder.

    trainer_name, needed: the loop, and the configuration that it reads. headline: see open_trackers. measure: (setup,
    name of a validation set, its loader) -> its metrics by name. also_saved: roles that a checkpoint has a folder of
    beside the actor's files. trains: without it, there are no training rows, no optimizer, and no model beside the
    policy but one that gives rewards. The other arguments are those of the loops.
    roles: the models beside the actor. agents: the processes of agents; None without. rewards: the reward processes;
    None where a reward model is the only reward, the agent gives it, or rows are given.
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
        reward_fn: RewardFns | None = None,
        trackers: Sequence[Tracker] = (),
        also_saved: Sequence[str] = (),
        trains: bool = True,
    ):
        _check_config(config, trainer_name, needed)
        self.config: Config = config
        self.loss_fn = config.loss_fn() if loss_fn is None else loss_fn
        self._kind: RowKind = kind
        self._trackers = trackers
        self._also_saved, self._trains = also_saved, trains
        with ExitStack() as stack:
            stack.enter_context(RunLog())
            self.rewards, self.agents, plan, roles, *_ = all_of(
                lambda: self._open_rewards(stack, reward_fn),
                lambda: self._open_agents(stack),
                lambda: plan_of_experiment(config),
                lambda: experiment_roles(config),
                lambda: train_dataset is not None or not trains or check_source(config.train_dataset, "train_dataset"),
                lambda: valid_dataset is not None or check_valid_sources(config.valid_dataset),
                lambda: check_services(config.stats_logger),
            )
            if trains:
                check_copies(config, plan.spec)
            else:
                plan, roles = _without_training(plan, roles)
            self.tokenizer = plan.tokenizer
            self.roles = {name: replace(role, path=role.path or plan.spec.actor.path) for name, role in roles.items()}
            self.valid_loaders = {
                valid.name: self._open_loader(plan, valid.config, valid.rows, valid.key)
                for valid in valid_sets(config, valid_dataset)
            }
            self.loader = self._open_train_loader(plan, train_dataset)
            evaluator = Evaluator(config, self.valid_loaders, partial(measure, self))
            for pool in (self.rewards, self.agents):
                if pool is not None:
                    pool.wait_ready()
            self.run = self._open_run(plan, run_dir, evaluator, headline)
            stack.callback(self.run.close)
            plan, self.roles = with_schedules(config, plan, self.roles, self.run.total_steps)
            at_once = self.roles if isinstance(config, PolicyExperimentConfig) else {}
            plan = replace(plan, spec=replace(plan.spec, planned=at_once))
            self.trainer = self._load(stack, plan, at_once)
            self._resources = stack.pop_all()

    def _load(self, stack: ExitStack, plan: TrainerPlan, roles: Mapping[str, RoleSpec]) -> Trainer:
        """The trainer with its models. On a cluster, the loss of a node meanwhile counts for recover.retries."""
        while True:
            try:
                with ExitStack() as trying:
                    trainer = trying.enter_context(Trainer.from_plan(plan, self.run.clock))
                    trainer.init()
                    if roles:
                        trainer.ensure_roles(roles)
                    stack.push(trying.pop_all())
                    return trainer
            except WorkerLost as lost:
                if self.config.scheduler.type == "local" or not self.run.may_restart:
                    self.run.give_up(lost)
                self.run.recovery.count(lost)

    def _open_rewards(self, stack: ExitStack, reward_fn: RewardFns | None) -> RewardPool | None:
        """Start the reward processes, which import the user's file while the data is read. None without a function."""
        config = self.config
        if not isinstance(config, PolicyExperimentConfig):
            return None
        if reward_fn is None and config.reward.fn is None and (config.reward.path or config.agent.fn) is not None:
            return None
        n_devices = 1
        if config.reward.workers is None:
            with contextlib.suppress(ConfigError):  # the plan tells
                n_devices = n_workers_here(config.engine, config.cluster, config.scheduler)
        return stack.enter_context(RewardPool(config.reward, reward_fn, n_devices=n_devices))

    def _reward_name(self) -> str:
        """The function and the model that give the rewards."""
        if not isinstance(config := self.config, PolicyExperimentConfig):
            return ""
        names = [name for name in (self.rewards and self.rewards.name, config.reward.path) if name]
        return " plus ".join(names) or f"that of {config.agent.fn}"

    def _open_agents(self, stack: ExitStack) -> AgentPool | None:
        """Start the agent processes likewise. None where samples are single completions."""
        if not isinstance(self.config, PolicyExperimentConfig) or self.config.agent.fn is None:
            return None
        return stack.enter_context(AgentPool(self.config.agent))

    def _open_train_loader(self, plan: TrainerPlan, given: Any) -> BatchLoader[Any]:
        if not self._trains:
            return next(iter(self.valid_loaders.values()))  # a run has some rows
        return self._open_loader(plan, self.config.train_dataset, given, "train_dataset")

    def _open_loader(self, plan: TrainerPlan, section: DatasetConfig, given: Any, key: str) -> BatchLoader[Any]:
        """Return the rows of a section, or those `given` by a script, as batches. key: the section, for messages."""
        config, limit, limit_key, thinking = self.config, plan.spec.context_len, "the model's context", None
        names: dict[str, str] = {}
        if config.brings_rows() and not section.is_given and isinstance(config, PolicyExperimentConfig):
            section, names = replace(section, loader=config.agent.fn), {f"{key}.loader": "agent.fn"}
        with keys_renamed(names.get):
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

    def _open_run(
        self, plan: TrainerPlan, run_dir: str | Path | None, evaluator: Evaluator, headline: Sequence[str]
    ) -> Run:
        """The run, which says what it works with and what in its schedules does not fit it."""
        run = Run(
            self.config, run_dir, self.loader, save=self._write_checkpoint,
            is_saved=lambda: self.trainer.checkpoint_written(),
            evaluator=evaluator, headline=headline, reward=self._reward_name(),
            unanswered=without_answers(self.loader) if self._kind == "prompt" else "",
            engine=lambda: self.trainer.engine, inputs=self._inputs(plan),
            facts=facts(self.config, plan, self.roles, self.loader) if self._trains else {},
            token_text=lambda token: plan.tokenizer.decode([token]),
            trackers=self._trackers,
        )  # fmt: skip
        for text in schedule_warnings(self.config, run.total_steps) if self._trains else ():
            logger.warning("%s", text)
        return run

    def _inputs(self, plan: TrainerPlan) -> dict[str, str]:
        """Fingerprints of the models and the data, which a run that goes on must have, too."""
        if not self._trains:
            return {}
        models = {"actor.path": plan.spec.actor.path, "tokenizer_path": plan.spec.tokenizer_path}
        models |= {role.key: role.path for role in self.roles.values() if role.optimizer is None}
        if plan.spec.actor.lora is not None and plan.spec.actor.lora.init_from:
            models["actor.init_lora_from"] = plan.spec.actor.lora.init_from
        found = {key: folder_fingerprint(path) for key, path in models.items()}
        return found | {"train_dataset": rows_fingerprint(self.loader.rows)}

    def _write_checkpoint(self, folder: Path) -> None:
        on_cuda = self.trainer.engine.spec.devices[0].startswith("cuda")
        background = self.config.saver.mode == "async" or (self.config.saver.mode == "auto" and on_cuda)
        merge = self.config.saver.merge_adapters
        self.trainer.write_checkpoint(folder, background=background, merge_adapters=merge)
        for role in self._also_saved:
            self.trainer.write_checkpoint(folder / role, role, background)

    def close(self) -> None:
        """End the reward processes and the workers, close the logs."""
        self._resources.close()


def _check_config(config: ExperimentConfig, trainer_name: str, needed: type[ExperimentConfig]) -> None:
    given = type(config).__name__
    if not isinstance(config, needed):
        raise ConfigError(f"config is a {given}; {trainer_name} needs a {needed.__name__}")
    if needed is PolicyExperimentConfig and isinstance(config, CriticExperimentConfig):
        raise ConfigError(f"{given} is for PPOTrainer, not for {trainer_name}: its critic would not be used")


def _without_training(plan: TrainerPlan, roles: dict[str, RoleSpec]) -> tuple[TrainerPlan, dict[str, RoleSpec]]:
    """The plan and the roles of an evaluation."""
    spec = plan.spec.frozen()
    return replace(plan, spec=spec), {name: role for name, role in roles.items() if name == "reward"}


PolicySetup = Setup[PolicyExperimentConfig]
