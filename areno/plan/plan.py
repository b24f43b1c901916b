"""Makes the plan of a Trainer from a configuration: devices, folders and tokenizer, checked against config.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from areno.config.experiments import ExperimentConfig, HeadName
from areno.config.fp8 import SIZE_MULTIPLE, no_units_problem
from areno.config.layout import ALONE, Layout
from areno.config.models import ModelConfig, PolicyConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import DecoderConfig, GenerationConfig, RolloutConfig
from areno.data.control_tokens import allow_control_tokens
from areno.data.solution_steps import step_separator
from areno.data.turn_ends import set_model_end_ids, stop_token_ids, template_end_ids
from areno.engine.decoder.grammar import find_ids_with_text
from areno.errors import ConfigError, Key, Problem, all_of
from areno.files.paths import name_model_setting_in_errors
from areno.models.config import TransformerConfig
from areno.models.fp8_layers import emulated_linears, fp8_problems
from areno.models.registry import layout_problems, load_config
from areno.plan.devices import devices_of
from areno.plan.folders import load_tokenizer, model_folder
from areno.plan.hardware import Hardware
from areno.plan.lora import KEY
from areno.plan.phases import decoder_concurrency
from areno.plan.roles import actor_role
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import DecoderConcurrency
from areno.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """The engine that a Trainer starts, and how it samples.

    If rollout.max_concurrent_rollouts is null, a rollout decodes as many of its samples at once as fit into memory.
    """

    spec: EngineSpec
    tokenizer: Any
    workers: str = "auto"  # a value of engine.workers, or "ray"
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    max_len: int | None = None  # tokens of a sequence in the KV cache; None: as many as each rollout needs
    tool_call_parser: str | None = None  # of agents; None: the format that the chat template describes
    reasoning_parser: str = "think"
    progress_interval_s: float = 10.0  # between log lines of a rollout
    shared: DecoderConcurrency | None = None  # None: an evaluation decodes no more samples at a time than training


def plan_of_experiment(config: ExperimentConfig) -> TrainerPlan:
    """Make the plan of a run from its configuration. Reads config.json and the tokenizer, but no weights."""
    plan = plan_of_actor(config, lambda: devices_of(config))
    if config.scheduler.type == "ray":
        plan = with_ray_cluster(plan, config)
    if not isinstance(config, PolicyExperimentConfig):
        return plan
    return replace(
        plan,
        rollout=replace(config.rollout, max_concurrent_rollouts=config.max_concurrent_samples),
        max_len=max_sequence_len(config, plan.spec.context_len),
        tool_call_parser=config.agent.tool_call_parser,
        reasoning_parser=config.agent.reasoning_parser,
        shared=decoder_concurrency(config, load_config(plan.spec.actor.path), plan.spec.layout),
    )


def with_ray_cluster(plan: TrainerPlan, config: ExperimentConfig) -> TrainerPlan:
    """Return a plan with workers on a Ray cluster. All nodes must see the same output folders."""
    folders = {"cluster.fileroot": config.cluster.fileroot, "saver.path": config.saver.path}
    shared = tuple((key, os.path.abspath(os.path.expanduser(path))) for key, path in folders.items() if path)
    spec = replace(
        plan.spec, n_nodes=config.cluster.n_nodes, shared=shared, setup_timeout=config.scheduler.setup_timeout
    )
    return replace(plan, spec=spec, workers="ray")


def plan_of_actor(
    config: ExperimentConfig, devices_of: Callable[[], list[str]], decoder: DecoderConfig | None = None
) -> TrainerPlan:
    """Make the plan of a Trainer without roles other than the actor. All problems are reported together.

    `decoder`: the settings of the decoder if `config` has none.
    """
    # These import torch, which building a Trainer does not need.
    from areno.kernels.backend import check_fp8

    devices, (path, model), tokenizer_folder = all_of(
        devices_of,
        lambda: _load_model_config(config.actor.path, config.head),
        lambda: config.tokenizer_path and model_folder(config.tokenizer_path, "tokenizer_path"),
    )
    tokenizer_folder = tokenizer_folder or path
    with name_model_setting_in_errors("tokenizer_path" if config.tokenizer_path else "actor.path"):
        tokenizer = load_tokenizer(tokenizer_folder)
    if config.allow_control_tokens:
        allow_control_tokens(tokenizer)
    problems = door_problems(config, model, devices)
    if len(tokenizer) > model.vocab_size:
        found = f"the tokenizer has {len(tokenizer)} tokens, the model only {model.vocab_size}; they do not match"
        problems.append(Problem("tokenizer_path", found))
    role, dtype, _ = all_of(
        lambda: actor_role(config, path, model),
        lambda: _dtype_of(config.actor, devices),
        lambda: _raise_if_any(problems),
    )
    fp8_kv = role.fp8_kv if decoder is None else decoder.fp8_kv
    if fp8_kv:
        check_fp8(devices, "rollout.kv_cache_dtype")
    set_model_end_ids(tokenizer, model.eos_token_ids)
    eos = stop_token_ids(tokenizer)
    has_lm_head = config.head == "lm"
    role = replace(
        role,
        pad_token_id=None if has_lm_head else tokenizer.pad_token_id,
        step_separator=step_separator(config.actor, model),
        fp8_kv=fp8_kv,
    )
    spec = replace(
        engine_spec(config, role, devices),
        dtype=dtype,
        tokenizer_path=tokenizer_folder,
        eos_token_ids=tuple(sorted(eos)),
        turn_end_ids=tuple(sorted(template_end_ids(tokenizer))) if has_lm_head else (),
        texts=find_ids_with_text(tokenizer, eos),
        context_len=model.max_position_embeddings,
    )
    return TrainerPlan(spec=spec, tokenizer=tokenizer, workers=config.engine.workers)


def engine_spec(config: ExperimentConfig, actor: RoleSpec, devices: list[str]) -> EngineSpec:
    """Return the specification of an engine. Fields from the tokenizer and the actor's folder are still unset."""
    return EngineSpec(
        actor=actor,
        devices=devices,
        engine=config.engine,
        seed=config.seed,
        routing_replay=isinstance(config.actor, PolicyConfig) and config.actor.routing_replay,
        mb_spec=config.actor.mb_spec,
        share_prefixes=config.actor.share_prefixes,
    )


def _dtype_of(actor: ModelConfig, devices: list[str]) -> str:
    """Return the data type of the weights. Raises ConfigError if a device does not support it."""
    from areno.kernels.backend import check_dtype, check_fp8, default_dtype
    from areno.models.weights import DTYPE_NAMES

    if actor.fp8 is not None and actor.fp8.rounds_inputs:
        check_fp8(devices)
    if actor.dtype == "auto":
        return DTYPE_NAMES[default_dtype(devices)]
    check_dtype(actor.dtype, devices)
    return actor.dtype


def _raise_if_any(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def _load_model_config(path: str, head: HeadName) -> tuple[str, TransformerConfig]:
    """Return the local folder and the shape of the actor's model. Raises ConfigError if it holds only adapters."""
    from areno.models.adapters import is_adapter_folder

    folder = model_folder(path, "actor.path")
    if is_adapter_folder(folder):
        text = "{} holds adapters and no model; name the model that they are for, with {}=true and {}={}"
        raise ConfigError(Problem("actor.path", text, folder, Key("actor.use_lora"), Key(KEY), folder))
    with name_model_setting_in_errors("actor.path"):
        return folder, load_config(folder, head)


def door_problems(config: ExperimentConfig, model: TransformerConfig, devices: list[str]) -> list[Problem]:
    """Return the problems that the model, the number and the kind of the devices decide, for a run and for a plan."""
    layout = config.engine.layout(len(devices))
    problems = [each.under("engine") for each in layout.problems()]
    problems += [*layout_problems(model, layout), *model_problems(config, model)]
    return [*problems, *engine_problems(config, model, devices[0], layout)]


def engine_problems(
    config: ExperimentConfig, model: TransformerConfig, device: str, layout: Layout = ALONE
) -> Iterator[Problem]:
    """Yield problems with settings that this device or model does not support."""
    actor, exact = config.actor, config.engine.exact
    if config.memory_profiler is not None and device == "cpu":
        yield Problem("memory_profiler", "takes snapshots of CUDA memory, but the run is on the CPU; leave it out")
    if model.experts is None:
        text = "but the model has no experts, so it has no effect; "
        if isinstance(actor, PolicyConfig) and actor.routing_replay:
            yield Problem("actor.routing_replay", f"is true, {text}set it to false")
        if actor.router_aux_loss_coef:
            yield Problem("actor.router_aux_loss_coef", f"is {actor.router_aux_loss_coef}, {text}set it to 0")
    if actor.fp8 is not None:
        yield from fp8_problems(model, actor.fp8)
        if exact and actor.fp8.rounds_inputs and device.startswith("cuda"):
            yield from _emulated_problems(actor, model, layout)
    if exact and (reason := reason_against_exact(model, device)):
        yield Problem("engine.exact", f"is true, but {reason}; set it to false")


def reason_against_exact(model: TransformerConfig, device: str) -> str:
    """Return why a model cannot have `engine.exact` on a device, or an empty text if it can."""
    if model.delta is not None:
        return "training and decoding compute the recurrent states of this model in different orders"
    if model.experts is not None and device.startswith("cuda"):
        return "the products of a model with experts have no fixed order on CUDA"
    return ""


def advice_on_rounding(spec: EngineSpec) -> str:
    """Return what to do where FP8 makes rollout and training differ."""
    reason = reason_against_exact(load_config(spec.actor.path, spec.actor.head), spec.devices[0])
    return "watch train/logp_abs_diff_mean" if reason else "set engine.exact=true"


def fp8_unit_problems(config: ExperimentConfig, hardware: Hardware) -> Iterator[Problem]:
    """Yield problems with FP8 on a GPU without FP8 units, as `kernels.backend.check_fp8` does for a run."""
    if hardware.has_fp8_units or not hardware.is_cuda:
        return
    if config.actor.fp8 is not None and config.actor.fp8.rounds_inputs:
        yield no_units_problem("actor.fp8_config", hardware.title)
    if isinstance(config, PolicyExperimentConfig) and config.rollout.fp8_kv:
        yield no_units_problem("rollout.kv_cache_dtype", hardware.title)


def _emulated_problems(actor: ModelConfig, model: TransformerConfig, layout: Layout) -> Iterator[Problem]:
    """Yield problems with FP8 products that a GPU would emulate, whose sums have no fixed order there."""
    assert actor.fp8 is not None
    if actor.dtype == "float32":
        text = "is float32, for which FP8 products are emulated, in no fixed order; set it to bfloat16, or {} to false"
        yield Problem("actor.dtype", text, Key("engine.exact"))
    elif found := emulated_linears(model, actor.fp8, layout):
        sizes = dict.fromkeys(f"{name.split('.', 2)[2]} ({o} x {i})" for name, (o, i) in found.items())
        text = "does not leave out {}, whose sizes on a rank are no multiples of {}, so that their products are "
        text += "emulated, in no fixed order; name these layers here, or set {} to false"
        yield Problem("actor.fp8_config.exclude_modules", text, ", ".join(sizes), SIZE_MULTIPLE, Key("engine.exact"))


def model_problems(config: ExperimentConfig, model: TransformerConfig) -> Iterator[Problem]:
    """Yield problems with lengths and stop tokens that exceed the model's context or vocabulary."""
    context = model.max_position_embeddings
    shown = f"{context} tokens{model.rope.limit_note}"
    if not isinstance(config, PolicyExperimentConfig):  # rows that are longer than the context are skipped
        return
    for name, gconfig in (("gconfig", config.gconfig), ("eval_gconfig", config.eval_gconfig)):
        if gconfig is None:
            continue
        most, new = gconfig.max_tokens, gconfig.max_new_tokens
        if most is not None and most > context:
            yield Problem(f"{name}.max_tokens", f"is {most}, the model's context is {shown}")
        if new >= context:
            found = f"is {new}; the model's context of {shown} must also hold a prompt"
            yield Problem(f"{name}.max_new_tokens", found)
        for token in gconfig.stop_token_ids or []:
            if not 0 <= token < model.vocab_size:
                found = f"holds {token}; the vocabulary has {model.vocab_size} tokens"
                yield Problem(f"{name}.stop_token_ids", found)


def check_rows_per_replica(config: ExperimentConfig, spec: EngineSpec) -> None:
    """Raise ConfigError if an optimizer step has fewer rows than there are data-parallel replicas.

    Not checked here, but during training: runs with agents, and an actor with gradient_accumulation_steps.
    """
    updates = {"actor": 1}
    if isinstance(config, PolicyExperimentConfig):
        if config.agent.fn is not None:
            return
        updates = {name: model.ppo_n_minibatches for name, model in config.trained_models().items()}
    if config.actor.gradient_accumulation_steps is not None:
        del updates["actor"]
    for name, n_updates in updates.items():
        if (each := config.items_per_step // n_updates) < spec.layout.n_data_parallel_groups:
            what = "pairs" if config.rows_per_item() == 2 else "rows"
            text = "is {}, so an update of the {} has {} {} for {} copies of the model, and each needs one; raise it"
            text += ", lower {}, or lower {}" if n_updates > 1 else ", or lower {}"
            keys = [Key(f"{name}.ppo_n_minibatches")] * (n_updates > 1) + [Key("engine.world_size")]
            args = (config.train_dataset.batch_size, name, each, what, spec.layout.n_data_parallel_groups, *keys)
            raise ConfigError(Problem("train_dataset.batch_size", text, *args))


def sampling_params(gconfig: GenerationConfig, n_recorded_tokens: int = 0) -> SamplingParams:
    return SamplingParams.of(gconfig, max_context_len=gconfig.max_tokens, top_logprobs=n_recorded_tokens)


def max_sequence_len(config: PolicyExperimentConfig, context_len: int) -> int:
    """Return the largest number of tokens of a prompt plus completion, in training and evaluation."""
    uses = [(config.gconfig, config.train_dataset.max_length_or_unlimited)]
    if config.valid_dataset is not None:
        sampled = config.eval_gconfig or config.gconfig
        uses += [(sampled, of_set.max_length_or_unlimited) for of_set in config.valid_dataset.by_name().values()]
    if config.agent.fn is not None:  # a conversation may fill the context
        uses = [(gconfig, context_len) for gconfig, _ in uses]
    return max(
        min(gconfig.max_tokens or context_len, context_len, max_prompt + gconfig.max_new_tokens)
        for gconfig, max_prompt in uses
    )
