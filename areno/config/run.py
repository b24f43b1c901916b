"""Settings of saving, evaluation, resuming, devices, machines and logs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from areno.config.layout import Layout
from areno.config.resuming import NEVER, RUN_LENGTH, SPEED_AND_ORDER
from areno.errors import ConfigError, Key, Problem, did_you_mean
from areno.schema.build import build
from areno.schema.fields import Flag, Needs, Section, check, require, setting, with_sections
from areno.schema.values import format_value, may_be_folder
from areno.services import GROUP, SERVICES, installed_service, installed_services
from areno.services.service import Service

_ALL = "Save (saver), evaluate (evaluator) or write a state (recover)"
_AT_STEPS = "every so many training steps. null: off"
_AT_EPOCHS = "every so many epochs. null: off"
_AT_SECS = "at the end of a step, so many seconds after the last {}. null: off"


@dataclass(kw_only=True)
class FrequencyConfig(Section):
    """How often a run saves, evaluates or writes a state. A setting that is null has no effect."""

    freq_steps: int | None = setting(None, help=f"{_ALL} {_AT_STEPS}", gt=0)
    freq_epochs: int | None = setting(None, help=f"{_ALL} {_AT_EPOCHS}", gt=0)
    freq_secs: float | None = setting(None, help=f"{_ALL} {_AT_SECS.format('one')}", gt=0)


@dataclass(kw_only=True)
class RecoverConfig(FrequencyConfig):
    """When states of a run are written, and whether a run resumes from a state.

    A run always writes a state at its end, unless mode is off.
    """

    mode: Literal["auto", "resume", "off"] = setting(
        "auto",
        help="auto: resume the earlier run of the same trial_name, or start a new one. resume: resume it, or end "
        "with an error. off: never resume, and write no states. Other names are on for auto and disabled for off",
        aliases={"on": "auto", "disabled": "off"},
    )
    freq_steps: int | None = setting(None, help=f"Write a state {_AT_STEPS}", gt=0)
    freq_epochs: int | None = setting(1, help=f"Write a state {_AT_EPOCHS}", gt=0)
    freq_secs: float | None = setting(600.0, help=f"Write a state {_AT_SECS.format('state')}", gt=0)
    keep: int = setting(2, help="Number of newest states to keep. While a state is written, there is one more", gt=0)
    retries: int = setting(
        3,
        help="How often the run may restart its worker processes after one was lost (killed, crashed, hanging). It "
        "continues from its last state",
        ge=0,
    )

    no_save_optim: bool = setting(
        False,
        help="Save states without moments: 4 bytes per parameter instead of 12 (with adam). A resumed run starts "
        "with moments of zero and continues its learning-rate schedule",
    )
    no_load_optim: bool = setting(
        False, help="Resume with moments of zero, whatever the state holds. The learning-rate schedule continues"
    )


@dataclass(kw_only=True)
class RecorderConfig(Section):
    """The flight recorder, from whose records `areno replay` recomputes steps."""

    max_gib: float = setting(
        1.0,
        help="Most disk space in GiB for records of steps and the states kept with them. The oldest are dropped. 0: "
        "nothing is recorded, so no step can be replayed",
        ge=0,
    )


_COMPARING = Needs("best_metric", so="checkpoints are not compared")


@dataclass(kw_only=True)
class SaverConfig(FrequencyConfig):
    """When and where checkpoints are written. A run always saves a checkpoint at its end."""

    heading = "Checkpoint"
    path: str | None = setting(
        None,
        help="Folder for the checkpoints of this run alone. In a sweep, each run has a subfolder. null: checkpoints/ "
        "in the folder of the run",
        flag=Flag("--save-path", help="Folder of the checkpoints. Default: checkpoints/ in the folder of the run"),
    )
    freq_steps: int | None = setting(
        100,
        help=f"Save a checkpoint {_AT_STEPS}",
        gt=0,
        flag=Flag(
            "--save-interval",
            help="Save a checkpoint each time this many training steps have passed, and at the end of the run",
        ),
    )
    freq_epochs: int | None = setting(None, help=f"Save a checkpoint {_AT_EPOCHS}", gt=0)
    freq_secs: float | None = setting(None, help=f"Save a checkpoint {_AT_SECS.format('checkpoint')}", gt=0)
    mode: Literal["auto", "sync", "async"] = setting(
        "sync",
        help="When a step continues. sync: when its checkpoint is on disk. async: when the weights are in host "
        "memory; they are written during the next step. auto: async on CUDA, sync on CPU",
    )
    keep: int | None = setting(None, help="Number of newest checkpoints to keep. null: all", gt=0)
    best_metric: str | None = setting(
        None,
        help="Metric that compares checkpoints, such as eval/rewards_mean (with eval/, every checkpoint is "
        "evaluated). The link `best` leads to the best, which is never removed. null: checkpoints are not compared",
    )
    best_mode: Literal["max", "min"] | None = setting(
        None,
        help="Whether larger or smaller values are better. null: min for a loss, max for other metrics",
        only_with=_COMPARING,
    )
    keep_best: int = setting(
        1,
        help="With keep and best_metric: best checkpoints to keep besides the newest",
        gt=0,
        only_with=(_COMPARING, Needs("keep", so="no checkpoint is removed")),
    )
    merge_adapters: bool = setting(
        False,
        help="With actor.use_lora: write whole models, with the adapters merged into the weights. false: write peft "
        "folders with the adapters only",
        only_with=Needs("actor.use_lora", so="there are no adapters"),
    )
    push_to_hub: str | None = setting(
        None,
        help="Repository of the Hugging Face hub (owner/name) to which every checkpoint is uploaded during the run; "
        "HF_TOKEN must hold an access token. In a sweep, names end with the index of the run. null: no upload",
    )
    hub_private: bool = setting(
        True,
        help="Create the repository of push_to_hub, if missing, as private. false: as public",
        only_with=Needs("push_to_hub", so="nothing is uploaded"),
    )

    @require("path", "is {self.path!r}; the path of a folder is expected")
    def path_may_be_folder(self) -> bool:
        return may_be_folder(self.path)


_EARLY_STOPPING = Needs("patience", so="the run is not ended early")


@dataclass(kw_only=True)
class EvaluatorConfig(FrequencyConfig):
    """When the model is evaluated on valid_dataset, and when early stopping ends the run.

    A run with a valid_dataset always evaluates at its end.
    """

    freq_steps: int | None = setting(None, help=f"Evaluate {_AT_STEPS}", gt=0)
    freq_epochs: int | None = setting(None, help=f"Evaluate {_AT_EPOCHS}", gt=0)
    freq_secs: float | None = setting(None, help=f"Evaluate {_AT_SECS.format('evaluation')}", gt=0)
    eval_before_train: bool = setting(False, help="Also evaluate once before the first training step")
    patience: int | None = setting(
        None,
        help="Early stopping: end after this many evaluations in a row in which metric did not improve. null: no "
        "early stopping",
        gt=0,
        on_resume=RUN_LENGTH,
    )
    metric: str | None = setting(
        None,
        help="Metric for early stopping, without eval/, such as accuracy, or gsm8k/accuracy for one of several "
        "evaluation sets. null: rewards_mean (RL) or loss (SFT, DPO)",
        only_with=_EARLY_STOPPING,
    )
    mode: Literal["max", "min"] | None = setting(
        None,
        help="Whether larger or smaller values are better. null: min for a loss, max for other metrics",
        only_with=_EARLY_STOPPING,
    )
    min_delta: float = setting(
        0.0, help="Smallest change of evaluator.metric that counts as an improvement", ge=0, only_with=_EARLY_STOPPING
    )

    @require(
        "patience",
        "is {self.patience}, but nothing is evaluated during training; set freq_steps, freq_epochs or freq_secs",
    )
    def patience_has_evaluations(self) -> bool:
        return self.patience is None or (self.freq_steps, self.freq_epochs, self.freq_secs) != (None, None, None)


@dataclass(kw_only=True)
class EngineConfig(Section):
    """Devices, parallelism and worker processes."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", help="Device type. auto: cuda if it is available, else cpu"
    )
    world_size: int | None = setting(
        None, help="Number of devices. null: all visible GPUs, or one CPU device", gt=0, flag="--world-size"
    )
    tp_size: int = setting(
        1, help="Number of devices that share one copy of the model (tensor parallel)", gt=0, flag="--tp-size"
    )
    cp_size: int = setting(
        1,
        help="Model copies that train each row together, each with a part of its tokens (context parallel), for rows "
        "too long for one. No effect on the rollout",
        gt=0,
    )
    zero_stage: Literal[0, 1, 2] = setting(
        1,
        help="What data-parallel copies shard (ZeRO, arXiv 1910.02054). 0: nothing. 1: fp32 master weights and "
        "moments. 2: also the gradients of the layers, with communication in every micro-batch. The result is the "
        "same",
    )
    sequence_parallel: bool | None = setting(
        None,
        help="With tp_size above 1, each device holds activations outside of matrix products, such as those of "
        "norms, only for its part of the tokens (sequence parallel, arXiv 2205.05198). The result is the same. null: "
        "true, unless exact is true",
    )
    workers: Literal["auto", "inline", "spawn"] = setting(
        "auto",
        help="inline: the driver (the process of the command) computes, on one device. spawn: one worker process per "
        "device. auto: inline for a single CPU device, else spawn",
    )
    attn_backend: Literal["auto", "flash", "native"] = setting(
        "auto",
        help="Attention kernels in training and prefill. flash: the flash-attn package. native, auto: those of torch "
        "(SDPA), also used below compute capability 8.0",
        flag=Flag("--attn-backend", heading="Rollout"),
    )
    exact: bool = setting(
        False,
        help="Compute each token in a fixed order of operations, so that log-probabilities of sampled tokens are "
        "bit-identical in rollout and training. If they differ, the run ends with an error",
    )
    deterministic: bool = setting(
        False,
        help="Make two runs of the same configuration and machine bit-identical, except times and memory. No "
        "measurable cost (one H200, 0.6B)",
    )
    dummy_load: bool = setting(
        False, help="Random weights in all models, for benchmarks without weight files", on_resume=NEVER
    )
    stall_timeout_s: float | None = setting(
        600.0,
        help="If a worker makes no progress (decoding steps, micro-batches) for this many seconds, report where it "
        "hangs and end all workers. The run restarts them, at most recover.retries times. null: no limit",
        gt=0,
        le=86400,
    )

    def layout(self, world_size: int) -> Layout:
        """Return the layout of a run on `world_size` ranks, one for each device."""
        return Layout(world_size, self.tp_size, self.cp_size)

    def node_problems(self, n_devices: int) -> Iterator[Problem]:
        """Yield a problem if `tp_size` does not divide `n_devices`, the devices that the run uses on each node."""
        if n_devices % self.tp_size:
            text = "is {}, but a node has {} devices of the run; tensor parallel stays inside a node"
            yield Problem("tp_size", text, self.tp_size, n_devices)

    @require("attn_backend", "is flash, but exact=true has an attention of its own; leave one of the two out")
    def exact_attention_is_native(self) -> bool:
        return not self.exact or self.attn_backend != "flash"

    @require(
        "sequence_parallel",
        "is true, which changes the order of sums, but exact=true keeps one order; leave one of them out",
    )
    def exact_sums_keep_order(self) -> bool:
        return not self.exact or self.sequence_parallel is not True

    @require("sequence_parallel", "is true, but tp_size=1 has no ranks that share tokens; leave one of them out")
    def sequence_parallel_has_ranks(self) -> bool:
        return self.sequence_parallel is not True or self.tp_size != 1

    @check
    def check_world_size(self) -> Iterator[Problem]:
        """Report tp_size or cp_size if they do not divide the devices."""
        if self.world_size is not None:
            yield from self.layout(self.world_size).problems()

    @check
    def check_inline_workers(self) -> Iterator[Problem]:
        """Report workers=inline if the run has several devices."""
        if self.workers == "inline" and (self.world_size or 1) > 1:
            text = "is inline, which runs one device, but {} is {}; use spawn"
            yield Problem("workers", text, Key("engine.world_size"), self.world_size)


@dataclass(kw_only=True)
class ClusterConfig(Section):
    """The machines of a run, and the folder of its files."""

    fileroot: str = setting(
        "outputs",
        help="Root folder of all runs: <fileroot>/<experiment_name>/<trial_name or start time>. Shared by all nodes "
        "of a run",
    )
    n_nodes: int = setting(
        1,
        help="Number of machines of the run. More than one machine needs scheduler.type=ray",
        gt=0,
        on_resume=SPEED_AND_ORDER,
    )
    n_gpus_per_node: int | None = setting(
        None,
        help="Devices on each node: GPUs, or worker processes on a CPU. null: engine.world_size / n_nodes. If that "
        "is null too, all GPUs of a node, or one copy of the model on a CPU",
        gt=0,
        on_resume=SPEED_AND_ORDER,
    )

    @require("fileroot", "is {self.fileroot!r}; the path of a folder is expected")
    def path_may_be_folder(self) -> bool:
        return may_be_folder(self.fileroot)


@dataclass(kw_only=True)
class SchedulerConfig(Section):
    """Where the worker processes are started: on this machine or on a Ray cluster."""

    type: Literal["local", "ray"] = setting(
        "local",
        help="local: start workers on this machine. ray: on the nodes of the Ray cluster of RAY_ADDRESS, else of the "
        "one that runs on this machine. If there is none, a run on one node starts its own Ray",
    )
    setup_timeout: float = setting(
        30.0,
        help="With type=ray: seconds to wait for missing nodes, at the start (then an error) or after a node was "
        "lost (then the run continues on the others)",
        ge=0,
        only_with=Needs("type", "ray", so="no nodes are waited for"),
    )


@dataclass(kw_only=True)
class TensorBoardConfig(Section):
    """Settings of the TensorBoard event files."""

    path: str | None = setting(
        None,
        help="Folder of the event files. In a sweep, each run has a subfolder. null: tensorboard/ in the folder of "
        "the run",
        flag=Flag(
            "--metrics-log-dir",
            help="Folder of TensorBoard's event files. Default: tensorboard/ in the folder of the run",
        ),
    )

    @require("path", "is {self.path!r}; the path of a folder is expected")
    def path_may_be_folder(self) -> bool:
        return may_be_folder(self.path)


@dataclass(kw_only=True)
@with_sections({name: (service.settings, service.title) for name, service in SERVICES.items()})
class StatsLoggerConfig(Section):
    """What the console shows, and where metrics are written besides logs/metrics.jsonl.

    Each service of areno/services has its own section, whose settings are declared in the service's file.
    """

    heading = "Observability"
    console: Literal["auto", "live", "lines", "full", "quiet"] = setting(
        "auto",
        help="What is printed to stderr. live: a display updated in place. lines: one line per step. full: all lines "
        "of logs/run.log. quiet: warnings and errors. auto: live on a terminal, else lines",
    )
    tensorboard: TensorBoardConfig = setting(factory=TensorBoardConfig, help="TensorBoard event files")
    trackers: dict[str, Any] = setting(
        factory=dict, help="Trackers of other installed packages (entry-point group areno.trackers): name -> settings"
    )

    @check
    def check_trackers(self) -> Iterator[Problem]:
        """Report each tracker that no installed package declares, and each problem with a tracker's settings."""
        for name in self.trackers:
            try:
                self._load_tracker(name)
            except ConfigError as error:
                yield from (problem.under(f"trackers.{name}") for problem in error.problems)

    def services(self) -> dict[str, Service]:
        """Return the services whose mode is not "disabled", and the trackers of other packages.

        The services are constructed, but not connected yet.

        Returns:
            Name of the section, such as "wandb" or "trackers.<name>" -> service.
        """
        found = {name: service(vars(self)[name]) for name, service in SERVICES.items()}
        found = {name: service for name, service in found.items() if service.config.mode != "disabled"}
        return found | {f"trackers.{name}": self._load_tracker(name) for name in self.trackers}

    def _load_tracker(self, name: str) -> Service:
        """Construct a tracker that another package declares. `name` is a key of `trackers`.

        Raises:
            ConfigError: The tracker is not installed, cannot be imported, or its settings are wrong. The keys of the
                problems are relative to the settings of the tracker.
        """
        if name not in installed_services():
            known = did_you_mean(name, installed_services())
            text = f"is no installed tracker{known}; its package declares it as an entry point of the group {GROUP}"
            raise ConfigError(Problem("", text))
        given = self.trackers[name]
        try:
            service = installed_service(name)
        except Exception as error:
            raise ConfigError(Problem("", f"does not import: {type(error).__name__}: {error}")) from error
        if given is not None and not isinstance(given, dict):
            raise ConfigError(Problem("", f"is {format_value(given)}; a mapping of its settings is expected"))
        return service(build(service.settings, given or {}))
