"""From configuration to engine: devices found, paths resolved, everything checked against the model before it is loaded."""

from __future__ import annotations

from typing import Any

from areno.config.experiments import ExperimentConfig, PolicyExperimentConfig
from areno.config.run import EngineConfig, GenerationConfig
from areno.engine.spec import EngineSpec, RolloutSpec
from areno.engine.types import SamplingParams
from areno.errors import ConfigError, Problem
from areno.models.config import TransformerConfig
from areno.models.hub import resolve
from areno.models.registry import load_config


def find_devices(engine: EngineConfig) -> list[str]:
    """The devices a run uses, one worker each. Raises ConfigError when there are fewer than asked for."""
    import torch

    visible = torch.cuda.device_count() if engine.device != "cpu" else 0
    if engine.device == "cuda" and not visible:
        raise ConfigError([Problem("engine.device", "is cuda, but torch sees no CUDA device; use cpu or auto")])
    if not visible:
        return ["cpu"] * (engine.world_size or engine.tp_size)
    wanted = engine.world_size or visible
    if wanted > visible:
        raise ConfigError([Problem("engine.world_size", f"is {wanted}, but only {visible} CUDA devices are visible")])
    return [f"cuda:{index}" for index in range(wanted)]


def engine_spec(config: ExperimentConfig) -> EngineSpec:
    """The engine an experiment needs. Raises ConfigError naming every key that does not fit the model or the machine."""
    actor: Any = config.actor  # type: ignore[attr-defined]  # every experiment has one, each of its own class
    devices = find_devices(config.engine)
    problems: list[Problem] = []
    if len(devices) % config.engine.tp_size:
        problems.append(
            Problem("engine.tp_size", f"is {config.engine.tp_size}, which does not divide the {len(devices)} devices")
        )
    path = str(resolve(actor.path))
    model = load_config(path)
    problems += model_problems(config, model)
    if problems:
        raise ConfigError(problems)
    ref_path = ""
    ref = getattr(config, "ref", None)
    if ref is not None:
        ref_path = path if ref.path in (None, actor.path) else str(resolve(ref.path))
    dtype = actor.dtype
    if dtype == "auto":
        dtype = "bfloat16" if devices[0].startswith("cuda") else "float32"
    return EngineSpec(
        model_path=path,
        devices=devices,
        tp_size=config.engine.tp_size,
        dtype=dtype,
        random_init=actor.init_from_scratch or config.engine.dummy_load,
        ref_path=ref_path,
        seed=config.seed,
        attn_backend=config.engine.attn_backend,
        gradient_checkpointing=actor.gradient_checkpointing,
        optimizer=actor.optimizer,
        mb_spec=actor.mb_spec,
        tokenizer_path=str(resolve(config.tokenizer_path)) if config.tokenizer_path else path,
    )


def model_problems(config: ExperimentConfig, model: TransformerConfig) -> list[Problem]:
    """What in a configuration does not fit the model."""
    problems = []
    tp_size = config.engine.tp_size
    for what, count in (("attention heads", model.num_heads), ("key-value heads", model.num_kv_heads)):
        if count % tp_size:
            problems.append(
                Problem("engine.tp_size", f"is {tp_size}, which does not divide the model's {count} {what}")
            )
    context = model.max_position_embeddings
    if isinstance(config, PolicyExperimentConfig):
        for name in ("gconfig", "eval_gconfig"):
            gconfig: GenerationConfig | None = getattr(config, name)
            if gconfig is None:
                continue
            if gconfig.max_tokens is not None and gconfig.max_tokens > context:
                problems.append(
                    Problem(f"{name}.max_tokens", f"is {gconfig.max_tokens}, the model's context is {context} tokens")
                )
            if gconfig.max_new_tokens >= context:
                problems.append(
                    Problem(
                        f"{name}.max_new_tokens",
                        f"is {gconfig.max_new_tokens}; the model's context of {context} tokens must hold a prompt beside it",
                    )
                )
            for token in gconfig.stop_token_ids or []:
                if not 0 <= token < model.vocab_size:
                    problems.append(
                        Problem(f"{name}.stop_token_ids", f"holds {token}; the vocabulary has {model.vocab_size} tokens")
                    )
    elif config.train_dataset.max_length > context:
        problems.append(
            Problem(
                "train_dataset.max_length",
                f"is {config.train_dataset.max_length}, the model's context is {context} tokens; lower it",
            )
        )
    return problems


def sampling_params(gconfig: GenerationConfig) -> SamplingParams:
    """The decoder's view of a gconfig section."""
    return SamplingParams(
        greedy=gconfig.greedy,
        top_p=gconfig.top_p,
        top_k=gconfig.top_k,
        max_new_tokens=gconfig.max_new_tokens,
        min_new_tokens=gconfig.min_new_tokens,
        max_context_len=gconfig.max_tokens,
        temperature=gconfig.temperature,
        stop=gconfig.stop,
        stop_token_ids=gconfig.stop_token_ids,
        ignore_eos=gconfig.ignore_eos,
        skip_special_tokens=gconfig.skip_special_tokens,
    )


def rollout_spec(config: PolicyExperimentConfig, context_len: int) -> RolloutSpec:
    """One rollout phase that serves both training and evaluation, so that its cache and graphs can be kept."""
    gconfigs = [config.gconfig] + ([config.eval_gconfig] if config.eval_gconfig else [])
    rollout = config.rollout
    max_len = max(
        min(g.max_tokens or context_len, context_len, config.train_dataset.max_length + g.max_new_tokens)
        for g in gconfigs
    )
    return RolloutSpec(
        max_running=rollout.max_concurrent_rollouts or config.train_dataset.batch_size * config.gconfig.n_samples,
        max_len=max_len,
        max_prefill_tokens=rollout.max_prefill_tokens,
        mem_fraction=rollout.mem_fraction,
        max_kv_tokens=rollout.max_kv_tokens,
        eager_decode=rollout.eager_decode,
    )
