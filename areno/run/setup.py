"""Opens the models, data, rewards and the run that a training loop uses, and closes them together."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from areno.agents.inline import InlineAgents
from areno.agents.pool import AgentPool
from areno.agents.program import check_program
from areno.agents.running import AgentRunner
from areno.api.trainer import Trainer
from areno.config.agent import COMMAND
from areno.config.datasets import DatasetConfig
from areno.config.experiments import ExperimentConfig, LossFn
from areno.config.policy_experiments import CriticExperimentConfig, DistillExperimentConfig, PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.config.sources import PromptDatasetConfig, agent_key, source_key
from areno.data.curriculum import Curriculum
from areno.data.loader import BatchLoader
from areno.data.mixed_loader import MixedLoader
from areno.data.row_schema import RowKind
from areno.data.solution_steps import StepEncoder, separator_problem
from areno.data.sources import check_source, check_valid_sources, valid_sets
from areno.engine.decoder.grammar import Vocabulary
from areno.environments.packages import check_packages
from areno.errors import CheckpointError, ConfigError, Key, Problem, WorkerLost, all_of, keys_renamed
from areno.files.paths import name_model_setting_in_errors
from areno.models.folder import has_same_weights
from areno.models.registry import load_config
from areno.plan.devices import n_local_workers
from areno.plan.folders import full_model_folder, load_tokenizer
from areno.plan.lr_schedule import device_warnings, schedule_warnings, staleness_warnings, with_schedules
from areno.plan.phases import decoder_concurrency
from areno.plan.plan import TrainerPlan, check_rows_per_replica, plan_of_experiment
from areno.plan.roles import experiment_roles
from areno.plan.startup_log import describe_missing_answers, startup_facts
from areno.plan.vocabularies import complete_roles
from areno.run import tuning
from areno.run.agents_across_steps import LiveAgents
from areno.run.checkpoints import SavedModels
from areno.run.evaluator import Evaluator
from areno.run.open_rows import open_loader
from areno.run.outputs import RunTexts
from areno.run.replaying import open_run, samples_nothing
from areno.run.run import Run
from areno.run.states import folder_fingerprint, rows_fingerprint
from areno.schema.fields import unused_setting_problems
from areno.scoring.judge_readers import EndpointJudge, JudgeBackend, RoleJudge
from areno.scoring.pool import RewardPool
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.tracking.check_result import copy_result, key_of
from areno.tracking.recorder import check_services
from areno.tracking.run_log import RunLog
from areno.tracking.tracker import Tracker
from areno.types import RewardRecord
from areno.user_processes.pool import usable_cores

logger = logging.getLogger("areno")

_MOST_ENCODERS = 4  # processes that encode rows, which are enough for 10,000 conversations of 60 tokens per second

RewardFn = Callable[[RewardRecord], Any]
RewardFns = RewardFn | Sequence[RewardFn]
"""One reward function, or several whose rewards are added with reward.weights."""
Config = TypeVar("Config", bound=ExperimentConfig, covariant=True)


class LoopKind(Protocol):
    """The class attributes of a training loop that `Setup` reads. areno.trainers.loop describes them."""

    needs: ClassVar[type[ExperimentConfig]]
    kind: ClassVar[RowKind]
    headline: ClassVar[tuple[str, ...]]
    also_saved: ClassVar[tuple[str, ...]]
    trains: ClassVar[bool]

    def measure(self, name: str, loader: BatchLoader[Any]) -> dict[str, float]: ...


class Setup(Generic[Config]):
    """The models, data, rewards and the run of one experiment.

    Opening a setup checks the configuration, starts the reward and agent processes, reads the data, makes the folder of
    the run and loads the models, in this order. All problems found before the data is read are raised together. The
    arguments `train_dataset`, `valid_dataset` (rows, or name -> rows) and `reward_fn` replace those in the
    configuration.

    Attributes:
        roles: Specification of each model other than the actor, such as "ref" or "critic".
        loader: Training batches. In an evaluation, the batches of the first validation set.
        rewards: The reward processes. None if no function gives a reward.
        judge: Asks the judge and reads its answers. None without a judge.
        evaluated_at_once: Most samples that an evaluation decodes at the same time. None: as many as in training.
        steps: Encodes completions for the process reward model of reward.path. None without such a model.
        agents: Runs the agents. None if samples are single completions.
    """

    def __init__(
        self,
        loop: LoopKind,
        config: Config,
        *,
        loss_fn: LossFn | None = None,
        run_dir: str | Path | None = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        reward_fn: RewardFns | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        _check_config(config, loop)
        self.config: Config = config
        self.loss_fn = with_distillation_loss(config, config.loss_fn() if loss_fn is None else loss_fn)
        self._loop, self._trackers = loop, trackers
        with ExitStack() as stack:
            stack.enter_context(RunLog())
            tuned = tuning.tune_for_script(config, run_dir) if loop.trains else None
            # Processes start first, so that they import the user's code while plan and data are read.
            self.rewards, self.agents, plan, roles, self.judge, *_ = all_of(
                partial(_open_rewards, config, reward_fn, stack),
                partial(_open_agents, config, stack),
                partial(plan_of_experiment, config),
                partial(experiment_roles, config),
                partial(_open_judge, config, stack),
                partial(self._check_sources, train_dataset, valid_dataset),
                partial(check_services, config.stats_logger),
            )
            if loop.trains:
                check_rows_per_replica(config, plan.spec)
                self.roles = complete_roles(roles, plan)
            else:
                plan = replace(plan, spec=plan.spec.without_optimizer())
                self.roles = {name: role for name, role in roles.items() if name in ("reward", "judge")}
            self.tokenizer = plan.tokenizer
            self.steps = _step_reader(config, self.roles, plan)
            plan = self._open_valid_sets(plan, valid_dataset)
            if loop.trains:
                self.loader = self._open_train_loader(plan, train_dataset)
                stack.callback(self.loader.close)
            else:
                self.loader = next(iter(self.valid_loaders.values()))
            for pool in filter(None, (self.rewards, self.agents)):
                pool.wait_ready()

            models = SavedModels(config, loop.also_saved)
            self.run = self._open_run(plan, run_dir, models)
            stack.callback(self.run.close)
            tuning.write_tuned_settings(self.run.folder, tuned)
            if self.agents is not None:
                self.agents.announce(self.run.folder)

            plan, self.roles = with_schedules(config, plan, self.roles, self.run.progress.total_steps)
            at_once = self.roles if isinstance(config, PolicyExperimentConfig) else {}
            plan = replace(plan, spec=replace(plan.spec, planned=at_once, profiling=self.run.tracer.spec))
            self.trainer = models.trainer = self._load_models(stack, plan, at_once)
            stack.callback(self.run.during_steps.close)
            self._resources = stack.pop_all()

    def _source_of(self, valid_set: str) -> str:
        """Return the source of training prompts whose agent, reward and limits a validation set has. "": none."""
        section = self.config.train_dataset
        sources = section.sources if isinstance(section, PromptDatasetConfig) else None
        return valid_set if sources and valid_set in sources else ""

    @cached_property
    def live_agents(self) -> LiveAgents | None:
        """The agents that live across steps. None without agents, and in an evaluation."""
        config = self.config
        if self.agents is None or not self._loop.trains or not isinstance(config, PolicyExperimentConfig):
            return None
        return LiveAgents(config, self.trainer, self.agents, self.run.during_steps)

    def _open_valid_sets(self, plan: TrainerPlan, given: Any) -> TrainerPlan:
        """Open the validation sets. Return the plan, with the number of samples that evaluations decode at once."""
        config = self.config
        self.valid_loaders = {
            valid.name: self._open_loader(plan, valid.config, valid.rows, valid.key, self._source_of(valid.name))
            for valid in valid_sets(config, given)
        }
        self.evaluated_at_once: int | None = None
        if not isinstance(config, PolicyExperimentConfig):
            return plan
        sets = self.valid_loaders.values()
        n_prompts = max((min(len(each.rows), each.config.batch_size or sys.maxsize) for each in sets), default=0)
        shared = decoder_concurrency(config, load_config(plan.spec.actor.path), plan.spec.layout, n_prompts)
        if shared is not None:
            self.evaluated_at_once = shared.most
        return replace(plan, shared=shared)

    def _check_sources(self, train: Any, valid: Any) -> None:
        """Raise an error if data files or environments do not exist, unless rows from a script replace them."""
        config, section = self.config, self.config.train_dataset
        checks: list[Callable[[], Any]] = []
        named: list[tuple[str, str | None]] = []
        sources = (section.sources if isinstance(section, PromptDatasetConfig) else None) or {}
        if train is None and self._loop.trains:
            of_key = {source_key(name): source for name, source in sources.items()} or {"train_dataset": section}
            for key, each in of_key.items():
                checks.append(partial(check_source, each, key))
                named.append((f"{key}.path", each.path))
        if valid is None:
            checks.append(partial(check_valid_sources, config.valid_dataset))
            named += [(f"{of.key}.path", of.config.path) for of in valid_sets(config, None)]
        if isinstance(config, PolicyExperimentConfig):
            named += [("agent.fn", config.agent.fn), *(("reward.fn", name) for name in config.reward.function_names)]
            for name, source in sources.items():
                named += [(agent_key(name), source.agent)]
                named += [(f"{source_key(name)}.reward", spec) for spec in source.reward_names]
        all_of(*checks, partial(check_packages, named))

    def _open_train_loader(self, plan: TrainerPlan, given: Any) -> Any:
        section = self.config.train_dataset
        if not isinstance(section, PromptDatasetConfig) or section.sources is None:
            return self._open_loader(plan, section, given, "train_dataset")
        if given is not None and (not isinstance(given, Mapping) or given.keys() != section.sources.keys()):
            text = "has the sources {}; give the trainer a mapping of these names to rows"
            raise ConfigError(Problem("train_dataset.sources", text, ", ".join(section.sources)))
        opened = all_of(
            *(
                partial(self._open_loader, plan, source, (given or {}).get(name), source_key(name), name)
                for name, source in section.sources.items()
            )
        )
        curriculum = Curriculum(section.curriculum, section.sources)
        return MixedLoader(dict(zip(section.sources, opened, strict=True)), curriculum, section.batch_size)

    def _open_loader(
        self, plan: TrainerPlan, section: DatasetConfig, given: Any, key: str, source: str = ""
    ) -> BatchLoader[Any]:
        trains = key.startswith("train_dataset")
        n_processes = _n_encoder_processes(plan.spec) if trains else 0
        return open_loader(self.config, self._loop.kind, plan, section, given, key, source, n_processes)

    def _open_run(self, plan: TrainerPlan, run_dir: str | Path | None, models: SavedModels) -> Run:
        """Open the run, and warn of settings that do not fit its length or devices."""
        config, trains = self.config, self._loop.trains

        def token_text(token: int) -> str:
            return plan.tokenizer.decode([token])

        texts = RunTexts(
            headline=self._loop.headline,
            reward=self._reward_name(),
            unanswered="" if self.rewards is None or self.agents is not None else describe_missing_answers(self.loader),
            facts=startup_facts(config, plan, self.roles, self.loader) if trains else {},
            token_text=token_text,
            is_untrained=partial(_has_initial_weights, plan.spec),
        )
        evaluator = Evaluator(config, self.valid_loaders, self._loop.measure)
        inputs = self._fingerprints(plan) if trains else {}
        run = open_run(
            config,
            run_dir,
            self.loader,
            models,
            evaluator=evaluator,
            texts=texts,
            trackers=self._trackers,
            inputs=inputs,
        )
        said = [*device_warnings(config, plan.spec)]
        if trains:
            copy_result(config, key_of(config, inputs), run.folder)
            said += [*schedule_warnings(config, run.progress.total_steps), *staleness_warnings(config)]
        for text in said:
            logger.warning("%s", text)
        return run

    def _reward_name(self) -> str:
        if not isinstance(config := self.config, PolicyExperimentConfig):
            return ""
        judge = config.reward.judge
        judged = f"the judge {judge.path or judge.model}" if judge.is_set else None
        names = [name for name in (self.rewards and self.rewards.name, config.reward.path, judged) if name]
        return " plus ".join(names) or f"that of {config.agent.fn}"

    def _fingerprints(self, plan: TrainerPlan) -> dict[str, str]:
        """Return the fingerprints (hashes) of the model and data files, keyed by the setting that names the files.

        A resumed run must have the same fingerprints.
        """
        models = {"actor.path": plan.spec.actor.path, "tokenizer_path": plan.spec.tokenizer_path}
        frozen = [role for role in self.roles.values() if role.optimizer is None]
        models |= {role.key: role.path if role.lora is None else role.lora.init_from for role in frozen}
        if plan.spec.actor.lora is not None and plan.spec.actor.lora.init_from:
            models["actor.init_lora_from"] = plan.spec.actor.lora.init_from
        found = {key: folder_fingerprint(path) for key, path in models.items()}
        keys = {name: source_key(name) if name else "train_dataset" for name in self.loader.parts}
        return found | {keys[name]: rows_fingerprint(part.rows) for name, part in self.loader.parts.items()}

    def _load_models(self, stack: ExitStack, plan: TrainerPlan, roles: Mapping[str, RoleSpec]) -> Trainer:
        """Load the models. If a Ray node is lost meanwhile, load them again, up to recover.retries times."""
        stack.callback(gc.unfreeze)
        gc.freeze()  # a garbage collection that scans all imported modules and rows would delay a step by 0.2 s
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
                if self.config.scheduler.type == "local" or not self.run.recovery.may_restart:
                    self.run.recovery.give_up(lost)
                self.run.recovery.count_restart(lost)

    def close(self) -> None:
        self._resources.close()


def _check_config(config: ExperimentConfig, loop: LoopKind) -> None:
    given, name = type(config).__name__, type(loop).__name__
    if not isinstance(config, loop.needs):
        raise ConfigError(f"config is a {given}; {name} needs a {loop.needs.__name__}")
    if loop.needs is PolicyExperimentConfig and loop.trains and isinstance(config, CriticExperimentConfig):
        raise ConfigError(f"{given} is for PPOTrainer, not for {name}: its critic would not be used")


def _has_initial_weights(spec: EngineSpec, checkpoint: Path) -> bool:
    """Return whether a checkpoint has the weights with which the run began. False if this is unknown."""
    if spec.actor.lora is not None or spec.actor.random_init:
        return False
    with contextlib.suppress(CheckpointError):  # such as weights that the user has moved away meanwhile
        return has_same_weights(checkpoint, Path(spec.actor.path))
    return False


def with_distillation_loss(config: ExperimentConfig, loss_fn: LossFn) -> LossFn:
    """Add the distillation loss to `loss_fn` if the run has a teacher and `loss_fn` is not that loss already."""
    if not isinstance(config, PolicyExperimentConfig) or config.teacher is None:
        return loss_fn
    if isinstance(config, DistillExperimentConfig):
        return loss_fn
    from areno.loss_fns import distillation_loss_fn

    method = config.actor.loss_prox_logp_method if isinstance(config.actor, RatioConfig) else "recompute"
    return partial(distillation_loss_fn, policy_loss_fn=loss_fn, **config.teacher.loss_settings(method))


def _open_rewards(config: ExperimentConfig, reward_fn: RewardFns | None, stack: ExitStack) -> RewardPool | None:
    """Start the reward processes. None if the run has no rewards, or if only models or the agents give rewards."""
    if not isinstance(config, PolicyExperimentConfig) or samples_nothing():
        return None
    by_source = config.train_dataset.reward_by_source
    given = reward_fn is not None or config.reward.fn is not None or any(by_source.values())
    if not given and (config.reward.has_model or config.agent.fn is not None or not config.needs_rewards):
        unused = [problem.under("reward") for problem in unused_setting_problems(config.reward, in_build=True)]
        if idle := [*unused, *config.idle_reward_problems()]:
            raise ConfigError(idle)
        return None
    return stack.enter_context(RewardPool(config.reward, reward_fn, n_devices=_n_devices(config), sources=by_source))


def _n_devices(config: ExperimentConfig) -> int:
    with contextlib.suppress(ConfigError):  # the plan raises it
        return n_local_workers(config)
    return 1


def _open_judge(config: ExperimentConfig, stack: ExitStack) -> JudgeBackend | None:
    """Open the judge: an endpoint, or a reader for a judge that the run loads. None if there is no judge."""
    if not isinstance(config, PolicyExperimentConfig) or samples_nothing():
        return None
    judge = config.reward.judge
    if judge.base_url is not None:
        return stack.enter_context(EndpointJudge(judge))
    if judge.path is None:
        return None
    path = full_model_folder(judge.path, "reward.judge.path")
    with name_model_setting_in_errors("reward.judge.path"), keys_renamed({"tokenizer_path": "reward.judge.path"}.get):
        model, tokenizer = load_config(path), load_tokenizer(path)
    return RoleJudge(judge, Vocabulary(path, model, tokenizer=tokenizer))


def _step_reader(config: ExperimentConfig, roles: Mapping[str, RoleSpec], plan: TrainerPlan) -> StepEncoder | None:
    """Return the encoder of steps for the process reward model of reward.path. None without such a model."""
    if not isinstance(config, PolicyExperimentConfig) or "reward" not in roles:
        return None
    section, path, key = config.reward, roles["reward"].path, "reward.step_separator"
    if roles["reward"].head != "step":
        text = "is set, but the model of {} is no process reward model; leave it out"
        names = [name for name in ("step_separator", "step_score") if not section.is_default(name)]
        if names:
            raise ConfigError([Problem(f"reward.{name}", text, Key("reward.path")) for name in names])
        return None
    model = load_config(path, "step", needs_head=True)
    separator = section.step_separator or model.hf.get("step_separator")
    if not isinstance(separator, str) or not separator:
        text = "is null, and config.json in {} has no step_separator; set it to the text after each step in the "
        text += "training of the model"
        raise ConfigError(Problem(key, text, Key("reward.path")))
    if problem := separator_problem(plan.tokenizer, separator):
        raise ConfigError(Problem(key, problem))
    limit = min(plan.spec.context_len, model.max_position_embeddings) - 1
    return StepEncoder(plan.tokenizer, separator, section.step_score, limit)


def _open_agents(config: ExperimentConfig, stack: ExitStack) -> AgentRunner | None:
    if not isinstance(config, PolicyExperimentConfig) or config.agent.fn is None or samples_nothing():
        return None
    agents = {name: config.agent_of(name) for name in ("", *(config.train_dataset.sources or {}))}
    if any(agent.fn == COMMAND for agent in agents.values()):
        check_program(config.agent)
    if config.agent.mode == "online":
        from areno.agents.online import OnlineAgents  # a server, which other runs need not import

        return stack.enter_context(OnlineAgents(config.agent))
    if config.agent.mode == "inline":
        return stack.enter_context(InlineAgents(agents))
    return stack.enter_context(AgentPool(agents, _n_devices(config)))


def _n_encoder_processes(spec: EngineSpec) -> int:
    """Return how many processes may encode rows: the CPU cores besides driver and workers, at most 4."""
    return max(0, min(_MOST_ENCODERS, usable_cores() - 1 - spec.n_ranks_on_machine(0)))


PolicySetup = Setup[PolicyExperimentConfig]
