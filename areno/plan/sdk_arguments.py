"""The arguments of a script's Trainer (areno.ArenoConfig, areno.Areno): their checks, and the plan made from them.

Errors of the engine name settings of a recipe, such as engine.tp_size. A script has arguments instead, so `argument_of`
returns the argument that an error must name (see areno.errors.keys_renamed). Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from areno.config.experiments import ExperimentConfig
from areno.config.layout import Layout
from areno.config.lora import LoraConfig
from areno.config.models import MicroBatchSpec, OptimizerConfig, PolicyConfig
from areno.config.rollout import DecoderConfig, RolloutConfig
from areno.config.run import EngineConfig
from areno.errors import Problem
from areno.plan.devices import find_devices
from areno.plan.plan import TrainerPlan, plan_of_actor
from areno.schema.build import build
from areno.schema.fields import Section, check, require, setting, setting_as_in, settings, with_settings_of


@dataclass
class ArenoConfig:
    """Settings of the local engine: the custom_config of a Trainer.

    Attributes:
        model_path: Folder or hub id of the weights, in place of the Trainer's model_path. The tokenizer is still read
            from the Trainer's model_path.
        tp_size: Number of ranks that share one replica of the model (tensor parallel).
        dp_size: Number of replicas of the model. None is world_size // tp_size, the only valid value.
        devices: CUDA device ids, one for each rank. None takes the first devices.
        dummy_load: Whether the policy and all other models get random weights, so that no folder needs weight files.
        optimizer: An areno.config.models.OptimizerConfig, or a dictionary of its fields. None takes the defaults.
        runtime: A dictionary of further settings of models, memory and decoding, whose keys are the fields of
            areno.plan.sdk_arguments.RuntimeConfig. None takes the defaults.
        max_running_prompts: Number of samples (not prompts) decoded at the same time, over all ranks. None decodes all
            samples of a rollout at the same time.
        decode_progress_interval_s: Seconds between log lines of a rollout.
    """

    model_path: str | None = None
    tp_size: int = 1
    dp_size: int | None = None
    devices: list[int] | None = None
    dummy_load: bool = False
    optimizer: dict[str, Any] | OptimizerConfig | None = None
    runtime: dict[str, Any] | None = None
    max_running_prompts: int | None = None
    decode_progress_interval_s: float = 10.0


_OF_TRAINER = ("world_size", "tp_size", "dummy_load")  # settings of `engine` that are arguments of their own
_OF_ACTOR = (
    "dtype",
    "gradient_checkpointing",
    "share_prefixes",
    "offload",
    "router_aux_loss_coef",
    "routing_replay",
    "fp8_config",
)


@dataclass(kw_only=True)
@with_settings_of(EngineConfig, *(name for name in settings(EngineConfig) if name not in _OF_TRAINER))
@with_settings_of(PolicyConfig, *_OF_ACTOR)
class RuntimeConfig(LoraConfig, DecoderConfig):
    """The keys of ArenoConfig.runtime. A key has the same meaning as the recipe setting of the same name."""

    max_tokens_per_mb: int | None = setting_as_in(MicroBatchSpec, "max_tokens_per_mb")
    drop_rollout_state: bool = setting(
        False, help="free the KV cache and the CUDA graphs at the end of each rollout session"
    )
    enable_thinking: bool | None = setting_as_in(RolloutConfig, "enable_thinking")
    tokenizer_path: str | None = setting(
        None, help="folder or hub id of the tokenizer; null = the Trainer's model_path"
    )
    allow_control_tokens: bool = setting_as_in(ExperimentConfig, "allow_control_tokens")
    seed: int = setting(1, help="seed of sampling and of random weights", ge=0)


@dataclass(kw_only=True)
class BackendSettings(Section):
    """The checked settings of an ArenoConfig. The attributes have the same names as in ArenoConfig."""

    model_path: str | None = setting(
        None, help="folder or hub id of weights to load in place of the Trainer's model_path"
    )
    tp_size: int = setting(1, help="ranks that share one copy of the model", gt=0)
    dp_size: int | None = setting(None, help="number of copies of the model (data parallel)", gt=0)
    devices: list[int] | None = setting(None, help="ids of the CUDA devices to use")
    dummy_load: bool = setting(False, help="use random weights in every model")
    optimizer: OptimizerConfig = setting(factory=OptimizerConfig, help="optimizer and learning-rate schedule")
    runtime: RuntimeConfig = setting(factory=RuntimeConfig, help="processes, memory, precision")
    max_running_prompts: int | None = setting(None, help="number of samples that are decoded at the same time", gt=0)
    decode_progress_interval_s: float = setting(
        10.0, help="seconds between log lines that show the progress of decoding", gt=0
    )

    @require("devices", "is {self.devices}; the ids of different CUDA devices are expected, from 0")
    def device_ids_are_distinct(self) -> bool:
        ids = self.devices or []
        return len({*ids}) >= len(ids) and min(ids, default=0) >= 0


@dataclass(kw_only=True)
class TrainerSettings(Section):
    """The checked arguments of a Trainer. The attributes have the same names as the arguments."""

    world_size: int = setting(help="number of ranks, each with one device", gt=0)
    model_path: str = setting(help="model folder or hub id")
    metrics_log_dir: str | None = setting(None, help="folder of TensorBoard event files")
    custom_config: BackendSettings = setting(factory=BackendSettings, help="an areno.ArenoConfig")

    @require("model_path", "is empty; a model folder or hub id is expected")
    def has_model_path(self) -> bool:
        return bool(self.model_path.strip())

    @check
    def check_layout(self) -> Iterator[Problem]:
        runtime: Any = self.custom_config.runtime
        layout = Layout(self.world_size, self.custom_config.tp_size, runtime.cp_size)
        for problem in layout.problems():
            yield problem.under("engine").renamed(argument_of)

    @check
    def check_dp_size(self) -> Iterator[Problem]:
        given, copies = self.custom_config.dp_size, self.world_size // self.custom_config.tp_size
        if given is not None and given != copies:
            found = f"is {given}, but world_size // tp_size is {copies}; set it to that, or leave it out"
            yield Problem("custom_config.dp_size", found)

    @check
    def check_device_ids(self) -> Iterator[Problem]:
        devices, size = self.custom_config.devices, self.world_size
        if devices is not None and len(devices) != size:
            found = f"is {devices}, but world_size is {size}; give one id for each rank"
            yield Problem("custom_config.devices", found)

    @check
    def check_inline_workers(self) -> Iterator[Problem]:
        runtime: Any = self.custom_config.runtime
        if runtime.workers == "inline" and self.world_size > 1:
            found = f"is inline, which holds one rank, but world_size is {self.world_size}; use spawn or auto"
            yield Problem("custom_config.runtime.workers", found)


class Areno:
    """The local engine, which is the only value of a Trainer's `backend_type`. A script need not pass it."""


def plan_of_arguments(given: TrainerSettings) -> TrainerPlan:
    """Make the plan of a Trainer from checked arguments. Reads config.json and the tokenizer, but no weights."""
    config, runtime = given.custom_config, given.custom_config.runtime
    actor = PolicyConfig.of(
        runtime,
        path=config.model_path or given.model_path,
        mb_spec=MicroBatchSpec.of(runtime),
        optimizer=config.optimizer,
    )
    more = {"world_size": given.world_size, "tp_size": config.tp_size, "dummy_load": config.dummy_load}
    engine = EngineConfig.of(runtime, **more)
    experiment = ExperimentConfig.of(
        runtime,
        experiment_name="script",
        actor=actor,
        engine=engine,
        tokenizer_path=runtime.tokenizer_path or given.model_path,
    )
    return replace(
        plan_of_actor(experiment, lambda: find_devices(engine, config.devices), runtime),
        rollout=RolloutConfig.of(runtime, max_concurrent_rollouts=config.max_running_prompts),
        progress_interval_s=config.decode_progress_interval_s,
    )


def read_arguments(
    world_size: Any, model_path: Any, backend_type: Any, custom_config: Any, metrics_log_dir: Any
) -> TrainerSettings:
    """Check the arguments of a Trainer. All problems are reported together."""
    problems = []
    if backend_type is not None and backend_type is not Areno:
        name = backend_type.__name__ if isinstance(backend_type, type) else repr(backend_type)
        problems.append(Problem("backend_type", f"is {name}; areno.Areno is the one there is, and the default"))
    data: dict[str, Any] = {"world_size": world_size, "model_path": _path_as_text(model_path)}
    data["metrics_log_dir"] = _path_as_text(metrics_log_dir)
    if isinstance(custom_config, ArenoConfig):
        given = vars(custom_config)
        default = {name for name in ("optimizer", "runtime") if given[name] is None}
        data["custom_config"] = {name: _path_as_text(value) for name, value in given.items() if name not in default}
    elif custom_config is not None:
        hint = "; write areno.ArenoConfig(**...)" if isinstance(custom_config, Mapping) else ""
        found = f"is a {type(custom_config).__name__}; an areno.ArenoConfig is expected{hint}"
        problems.append(Problem("custom_config", found))
    return build(TrainerSettings, data, problems)


def _path_as_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


# Setting of a recipe -> argument of a script.
_ARGUMENTS = {
    "actor.path": "model_path",
    "actor.optimizer": "custom_config.optimizer",
    "engine.world_size": "world_size",
    "engine.tp_size": "custom_config.tp_size",
    "engine.dummy_load": "custom_config.dummy_load",
    "train_dataset.batch_size": "the number of rows",
    "train_dataset.max_length": "the length of the prompts",
    "gconfig.n_samples": "n_samples",
    "gconfig.max_tokens": "SamplingParams.max_context_len",
    "rollout.max_concurrent_rollouts": "max_running_prompts",
    "saver.path": "path",
    "stats_logger.tensorboard.path": "metrics_log_dir",
    "tokenizer_path": "custom_config.runtime.tokenizer_path",
    "devices": "custom_config.devices",
}
_OF_ANY_MODEL = {
    "ppo_n_minibatches": "n_minibatches",
    "mb_spec.max_tokens_per_mb": "custom_config.runtime.max_tokens_per_mb",
    "gradient_checkpointing": "custom_config.runtime.gradient_checkpointing",
}


def argument_of(setting: str) -> str:
    """Return the argument of a script that corresponds to a recipe's setting. Without one, return the setting."""
    if setting in _ARGUMENTS:
        return _ARGUMENTS[setting]
    section, _, name = setting.partition(".")
    if section == "gconfig" and name:
        return f"SamplingParams.{name}"
    if name in _OF_ANY_MODEL:
        return _OF_ANY_MODEL[name]
    if name.startswith("optimizer."):
        return f"custom_config.{name}"
    if section in ("engine", "actor", "rollout") and name.partition(".")[0] in settings(RuntimeConfig):
        return f"custom_config.runtime.{name}"
    return setting
