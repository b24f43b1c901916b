"""Settings of a whole run: a class for each training loop, to which recipes add settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from areno.config import datasets, models, run, tracing
from areno.config.optimizers import WITH_MOMENTS
from areno.config.resuming import (
    FROM_HERE,
    KEEPS_FOLDER,
    NEVER,
    RECORDS,
    RUN_LENGTH,
    SAME_CONTENT,
    SPEED,
    SPEED_AND_ORDER,
)
from areno.config.run import RecoverConfig, StatsLoggerConfig
from areno.errors import ConfigError, Key, Problem, did_you_mean
from areno.schema.fields import MissingSetting, Needs, Section, build_check, check, require, setting, source_check

MAX_NAME_BYTES = 255  # bytes in the name of a folder, on every common file system
EVALUATION = Needs("valid_dataset", so="nothing is evaluated", do="set valid_dataset.path", in_build=True)

HeadName = Literal["lm", "value", "step"]
"""Head of a model. "lm" predicts the next token. "value" computes one score for each token (critic, reward model).
"step" computes scores of two labels, wrong and right, for each token (process reward model)."""

LossFn = Callable[..., Any]
"""A loss function (pack, logprobs) -> (loss, stats), as areno.loss_fns describes it."""


@dataclass(kw_only=True)
class ExperimentConfig(Section):
    """Settings that every run has. Each recipe has a subclass that adds settings and defines the loss."""

    heading = "Basic"
    experiment_name: str = setting(
        help="Name of the experiment, and of the folder that holds its runs", on_resume=KEEPS_FOLDER
    )
    trial_name: str | None = setting(
        None, help="Name of the run and of its folder. null: the start time", on_resume=KEEPS_FOLDER
    )
    seed: int = setting(
        1, help="Seed of the data order, of sampling and of random weights", ge=0, on_resume=NEVER, read_by_rollout=True
    )
    total_train_epochs: int = setting(
        10,
        help="Passes over the training data. total_train_steps, total_train_n_seqs and total_train_n_tokens may end "
        "the run earlier",
        gt=0,
        flag="--epochs",
        on_resume=RUN_LENGTH,
    )
    total_train_steps: int | None = setting(
        None, help="End after this many training steps. null: no limit", gt=0, flag="--max-steps", on_resume=RUN_LENGTH
    )
    total_train_n_seqs: int | None = setting(
        None,
        help="End after this many samples (RL) or rows of data (SFT, DPO, KTO, reward models). null: no limit",
        gt=0,
        on_resume=RUN_LENGTH,
    )
    tokenizer_path: str | None = setting(
        None,
        help="Folder or hub id of the tokenizer. null: that of actor.path",
        on_resume=SAME_CONTENT,
        read_by_rollout=True,
    )
    allow_control_tokens: bool = setting(
        False,
        help="Whether text in a system, user or tool message that spells a control token (turn marker, bos, eos, "
        "pad) is encoded as this token, or as ordinary text",
        read_by_rollout=True,
    )
    enable_offload: bool = setting(
        False, help="Turn on offload of every model of the run, such as actor.offload and ref.offload", on_resume=SPEED
    )
    actor: models.ModelConfig = setting(help="The model that is trained")
    engine: run.EngineConfig = setting(
        factory=run.EngineConfig,
        help="Devices, parallelism and worker processes",
        on_resume=SPEED_AND_ORDER,
        read_by_rollout=True,
    )
    train_dataset: datasets.DatasetConfig = setting(
        factory=datasets.DatasetConfig,
        help="Training data",
        required_in_build=True,
        on_resume=NEVER,
        read_by_rollout=True,
    )
    valid_dataset: datasets.ValidDatasetConfig | None = setting(
        None, help="Evaluation data. null: no evaluation", flags={}, on_resume=FROM_HERE
    )
    saver: run.SaverConfig = setting(
        factory=run.SaverConfig, help="When and where checkpoints are saved", on_resume=FROM_HERE
    )
    evaluator: run.EvaluatorConfig = setting(
        factory=run.EvaluatorConfig,
        help="When the model is evaluated, and early stopping",
        only_with=EVALUATION,
        on_resume=FROM_HERE,
    )
    recover: RecoverConfig = setting(
        factory=RecoverConfig,
        help="Saving the state of a run, and resuming an interrupted run",
        only_with=Needs("recover.mode", "auto", "resume", so="no states are written", in_build=True),
        on_resume=FROM_HERE,
    )
    recorder: run.RecorderConfig = setting(
        factory=run.RecorderConfig,
        help="The flight recorder: what `areno replay` needs to recompute steps",
        on_resume=RECORDS,
    )
    stats_logger: StatsLoggerConfig = setting(
        factory=StatsLoggerConfig, help="Console output, and the services that metrics are sent to", on_resume=FROM_HERE
    )
    perf_tracer: tracing.PerfTracerConfig = setting(
        factory=tracing.PerfTracerConfig,
        help="A trace of the run: a timeline of processes, devices and samples",
        on_resume=FROM_HERE,
    )
    memory_profiler: tracing.MemoryProfilerConfig | None = setting(
        None, help="Snapshots of the device memory. null: no snapshots", on_resume=FROM_HERE
    )
    cluster: run.ClusterConfig = setting(
        factory=run.ClusterConfig, help="Machines and output folder", on_resume=KEEPS_FOLDER
    )
    scheduler: run.SchedulerConfig = setting(
        factory=run.SchedulerConfig, help="How worker processes are started", on_resume=SPEED_AND_ORDER
    )

    head: ClassVar[HeadName] = "lm"
    """Head of the actor."""

    def rows_per_item(self) -> int:
        """Return the number of training rows that stay together, such as 2 for a pair of answers."""
        return 1

    @property
    def items_per_step(self) -> int:
        """Largest number of units in a step. A unit is the `rows_per_item` rows that stay together, such as a pair."""
        return self.train_dataset.batch_size

    def offloads(self, section: Any) -> bool:
        """Return whether a model is offloaded, by the setting `offload` of its section or by enable_offload."""
        return self.enable_offload or section.offload

    @source_check
    def check_has_data(self) -> Iterator[Problem]:
        """Report a run without a source of training rows."""
        if not self.train_dataset.has_source:
            yield MissingSetting("train_dataset.path", datasets.MISSING_ROWS)

    @build_check
    def check_evaluation_has_data(self) -> Iterator[Problem]:
        """Report that saver.best_metric is an eval/* metric although nothing is evaluated."""
        if self.valid_dataset is None and (metric := self.saver.best_metric or "").startswith("eval/"):
            yield EVALUATION.problem("saver.best_metric", metric, None)

    @build_check
    def check_evaluator_metric(self) -> Iterator[Problem]:
        """Report that evaluator.metric or saver.best_metric names a metric that evaluation does not measure."""
        return iter(()) if self.valid_dataset is None else metric_problems(self, self.valid_dataset.by_name())

    def trained_models(self) -> dict[str, Any]:
        """Return role -> section of each trained model."""
        return {"actor": self.actor}

    @check
    def check_saved_moments(self) -> Iterator[Problem]:
        """Report settings about optimizer moments if every optimizer is SGD, which has no moments."""
        if all(model.optimizer.type not in WITH_MOMENTS for model in self.trained_models().values()):
            for name in (name for name in ("no_save_optim", "no_load_optim") if vars(self.recover)[name]):
                text = "is true, but {} is {}, which has no moments; leave it out"
                yield Problem(f"recover.{name}", text, Key("actor.optimizer.type"), self.actor.optimizer.type)

    trains_conversations: ClassVar[bool] = False

    @check
    def check_conversation_settings(self) -> Iterator[Problem]:
        """Report changed_turns for an algorithm that does not train on the turns of conversations."""
        sets = {"train_dataset": self.train_dataset, "valid_dataset": self.valid_dataset}
        for name, section in () if self.trains_conversations else sets.items():
            if section is not None and not section.is_default("changed_turns"):
                text = "is {}, but this algorithm does not train on the turns of conversations; leave it out"
                yield Problem(f"{name}.changed_turns", text, section.changed_turns)

    @check
    def check_session_tracer(self) -> Iterator[Problem]:
        """Report perf_tracer.session_tracer.enabled for a run without agents."""
        if self.perf_tracer.session_tracer.enabled:
            key, agent = "perf_tracer.session_tracer.enabled", vars(self).get("agent")
            if agent is None:
                yield Problem(key, "is true, but this algorithm has no agents; leave it out")
            elif agent.fn is None:
                text = "is true, but {} is null, so there are no agent sessions; set it, or leave this out"
                yield Problem(key, text, Key("agent.fn"))

    @require(
        "cluster.n_nodes",
        "is {self.cluster.n_nodes}, but scheduler.type=local runs on this machine alone; set scheduler.type=ray, "
        "or lower it to 1",
    )
    def several_nodes_have_scheduler(self) -> bool:
        return self.cluster.n_nodes <= 1 or self.scheduler.type != "local"

    @require(
        "engine.workers", "is inline, which runs in this process, but scheduler.type=ray starts processes; leave it out"
    )
    def inline_workers_are_local(self) -> bool:
        return self.engine.workers != "inline" or self.scheduler.type != "ray"

    @check
    def check_devices_per_node(self) -> Iterator[Problem]:
        """Report a number of devices that cannot be divided evenly among the nodes."""
        size, n_nodes, n_each = self.engine.world_size, self.cluster.n_nodes, self.cluster.n_gpus_per_node
        if n_each is not None and size is not None and size != n_nodes * n_each:
            text = "is {}, but {}={} and {}={} make {}; leave one of them out"
            nodes, each = Key("cluster.n_nodes"), Key("cluster.n_gpus_per_node")
            yield Problem("engine.world_size", text, size, nodes, n_nodes, each, n_each, n_nodes * n_each)
            return
        if size is not None and size % n_nodes:
            text = "is {}, which {}={} nodes cannot share evenly"
            yield Problem("engine.world_size", text, size, Key("cluster.n_nodes"), n_nodes)
            return
        n_each = n_each or (n_nodes > 1 and size and size // n_nodes)
        if n_each:
            yield from (problem.under("engine") for problem in self.engine.node_problems(n_each))

    @check
    def check_run_names(self) -> Iterator[Problem]:
        """Report an experiment_name or trial_name that cannot be the name of a folder."""
        for key in ("experiment_name", "trial_name"):
            name = vars(self).get(key)
            if name is None:
                continue
            if not name.strip() or "/" in name or not name.isprintable() or name in (".", ".."):
                yield Problem(key, f"is {name!r}; a printable folder name without '/' is expected")
            elif (size := len(name.encode())) > MAX_NAME_BYTES:
                yield Problem(key, f"has {size} bytes; a folder name has at most {MAX_NAME_BYTES}")

    def eval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that an evaluation measures. The first is the default of evaluator.metric."""
        return ()

    def objective(self) -> tuple[str, Literal["max", "min"]]:
        """Return the metric by which a sweep compares runs.

        Returns:
            (text, mode). The text describes the metric, such as "eval/loss of the last evaluation". The mode is "max"
            if larger values are better, otherwise "min".
        """
        if "accuracy" in self.eval_metrics():
            return self._objective("eval/accuracy", "train/accuracy, mean of the last 5 steps", "max")
        return self._objective("eval/loss", "train/loss of the last step", "min")

    def _objective(
        self, evaluated: str, trained: str, mode: Literal["max", "min"]
    ) -> tuple[str, Literal["max", "min"]]:
        return (trained if self.valid_dataset is None else f"{evaluated} of the last evaluation"), mode

    def loss_fn(self) -> LossFn:
        """Return the loss function that the settings describe.

        Raises:
            ConfigError: The class defines no loss.
        """
        raise ConfigError(f"{type(self).__name__} describes no loss; give the trainer a loss_fn")


def pass_at_k_values(n_samples: int) -> list[int]:
    """Return the values of k for which pass@k is measured: 1, 2, 4, ... below n_samples, and n_samples itself."""
    return [*(1 << i for i in range((n_samples - 1).bit_length())), n_samples]


def metric_problems(config: ExperimentConfig, sets: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem if evaluator.metric or saver.best_metric names a metric that evaluation does not measure.

    Args:
        config: Settings of the run.
        sets: Names of the evaluation sets, which become parts of the names of metrics. "" for a single set.
    """
    metrics, best = config.eval_metrics(), config.saver.best_metric or ""
    names = [*metrics, *(f"{name}/{of_set}" for name in sets if name for of_set in metrics)]
    asked = [("evaluator.metric", config.evaluator.metric, names)]
    if best.startswith("eval/"):
        asked.append(("saver.best_metric", best, [f"eval/{name}" for name in names]))
    for key, metric, there in asked:
        if metric is not None and metric not in there:
            known = did_you_mean(metric, there, otherwise=f"; there are {', '.join(there)}")
            yield Problem(key, f"is {metric}, which is not measured{known}")


class RowExperimentConfig(ExperimentConfig):
    """Settings of training on the rows of a dataset, without sampling. The base of all such experiments."""


class SupervisedExperimentConfig(RowExperimentConfig):
    """Settings of supervised fine-tuning."""

    trains_conversations: ClassVar[bool] = True

    def eval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that an evaluation measures. The first is the default of evaluator.metric."""
        return ("loss",)


@dataclass(kw_only=True)
class ReferencedExperimentConfig(RowExperimentConfig):
    """Settings of training on answers that a reference model scores before training."""

    ref: models.ScoringRefConfig = setting(
        factory=models.ScoringRefConfig,
        help="Frozen reference model. Its log-probabilities of every answer are computed once, before training",
    )

    def needs_reference(self) -> bool:
        """Return whether the loss compares with a reference model. If not, no row is scored before training."""
        return True


class UnpairedExperimentConfig(ReferencedExperimentConfig):
    """Settings of training on single answers that are labelled as desirable or undesirable, such as KTO."""

    def eval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that an evaluation measures. The first is the default of evaluator.metric."""
        return ("loss", "accuracy", "margin", "kl")


class RewardModelExperimentConfig(RowExperimentConfig):
    """Settings of training a reward model on ranked answers."""

    head: ClassVar[HeadName] = "value"

    def rows_per_item(self) -> int:
        """Return 2, the number of answers of a pair. Rows with a list of answers have more."""
        return 2

    def eval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that an evaluation measures. The first is the default of evaluator.metric."""
        return ("loss", "accuracy", "margin", "confidence", "calibration_error", "rewards_mean")


@dataclass(kw_only=True)
class ProcessRewardActorConfig(models.ModelConfig):
    """The process reward model that is trained."""

    step_separator: str | None = setting(
        None,
        help="Text after each step of a solution, which no step may contain. The score of a step is read at its last "
        "token. Checkpoints record it in config.json. null: that of config.json of actor.path, else a line break",
        may_be_blank=True,
    )

    @require(
        "use_lora",
        "is true, but adapters leave the head as it is, which a process reward model must learn; set it to false",
    )
    def head_is_trainable(self) -> bool:
        return not self.use_lora


@dataclass(kw_only=True)
class ProcessRewardExperimentConfig(RowExperimentConfig):
    """Settings of training a process reward model on solutions with labelled steps."""

    actor: ProcessRewardActorConfig = setting(help="The process reward model that is trained")

    head: ClassVar[HeadName] = "step"

    def eval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that an evaluation measures. The first is the default of evaluator.metric."""
        measured = ("loss", "accuracy", "margin", "confidence")
        return (*measured, "first_error_accuracy", "calibration_error", "rewards_mean")


class PreferenceExperimentConfig(ReferencedExperimentConfig):
    """Settings of training on pairs of a preferred and a rejected answer, such as DPO."""

    def rows_per_item(self) -> int:
        """Return 2: a pair has a chosen and a rejected answer."""
        return 2

    def eval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that an evaluation measures. The first is the default of evaluator.metric."""
        return ("loss", "accuracy", "margin", "ranking_accuracy")
