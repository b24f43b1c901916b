"""Hints that are added to errors about unknown settings.

`setting_hint` recognises settings of other algorithms, names of other tools (`other_tools.COUNTERPARTS`), and settings
of AReaL that areno does not have (`NOT_HERE`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from areno.api.algorithms import algorithm_names, get_algorithm
from areno.files.small_yaml import load_yaml
from areno.launch.other_tools import COUNTERPARTS
from areno.schema.fields import Section, setting_rows

_OWN_ENGINE = "areno has an engine of its own; see the settings of engine and rollout"
_OWN_PROCESSES = "areno starts its processes itself; see engine.world_size and engine.tp_size"
_NO_SERVERS = "rollout runs in the processes that train, so there are no inference servers"
_NO_LORA = "adapters are for the actor; the critic is trained whole"
_NO_FP8 = "only the actor and its reference compute in FP8, see actor.fp8_config; other models compute in actor.dtype"
_ONE_ADAPTER = "rollout uses the adapter of actor.use_lora; there are no others"
_SECRET = "it would be kept in the files of the run; set the environment variable"
_NO_LOSS_SCALE = "only float16 needs a loss scale, and actor.dtype has no float16"
_NO_LOADERS = "the rows of later steps are encoded beside the run, by processes if a thread is too slow"
_AGENTS = "numbers of agents are always logged, as rollout/agent_* and rollout/tool_calls_mean"
_TIMEOUT = "see engine.stall_timeout_s"


def _texts_by_key(sections: tuple[str, ...], texts: dict[str, str]) -> dict[str, str]:
    return {f"{section}.{name}": text for section in sections for name, text in texts.items()}


_RUN = {
    **dict.fromkeys(("sglang", "vllm"), _OWN_ENGINE),
    **dict.fromkeys(("launcher", "allocation_mode"), _OWN_PROCESSES),
    **dict.fromkeys(("cluster.name_resolve", "cluster.cluster_name"), "with scheduler.type=ray, Ray finds machines"),
    **dict.fromkeys(("scheduler.endpoint", "scheduler.deploy_mode"), _OWN_PROCESSES),
    **dict.fromkeys(
        ("scheduler.functioncall_service_domain", "scheduler.reward_functioncall_config"),
        "processes of the run compute rewards; see reward.fn and reward.workers",
    ),
    **dict.fromkeys(
        ("scheduler.reward_model_path", "scheduler.reward_model_service_url"),
        "a reward model is a part of the run; see reward.path",
    ),
}

_OF_MODELS = {
    **dict.fromkeys(("fsdp", "megatron", "archon", "backend"), _OWN_ENGINE),
    **dict.fromkeys(("_version", "scheduling_spec", "scheduling_strategy"), _OWN_PROCESSES),
    **dict.fromkeys(("admin_api_key", "request_timeout"), "the processes of a run send each other no HTTP requests"),
    **dict.fromkeys(("setup_timeout", "workers_ready_timeout"), _TIMEOUT),
    "log_level": "stats_logger.console sets what the console shows",
    "attn_impl": "see engine.attn_backend",
    "use_kernels": "on a GPU, areno always uses its own kernels",
    "is_critic": "the section decides: critic has values, actor and ref have none",
    "pad_to_maximum": "rows are packed without padding",
    "disable_dropout": "no model has dropout",
    "grad_reduce_dtype": "gradients are always summed in float32",
    "optimizer_dtype": "master weights are always float32; actor.optimizer.type sets the size of the moments",
    "weight_update_mode": "rollout and training share the weights, so none are sent",
    "enable_tree_training": "actor.share_prefixes decides for all models of the run",
}

_OF_MICRO_BATCHES = {
    "n_mbs": "set their size, not their number: mini_bs rows or max_tokens_per_mb tokens",
    "n_mbs_divisor": "ranks may have different numbers of micro-batches",
    "granularity": "rows are packed one by one; the two rows of a preference pair stay together",
    "packing_algorithm": "rows are dealt to the copies of the model by cost, and packed first-fit decreasing (ffd)",
}

_OF_OPTIMIZERS = {
    **dict.fromkeys(("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _NO_LOSS_SCALE),
}

_POWERS = "scales are powers of two, from the values of each token and of each output of a weight"
_OF_FP8 = {
    **dict.fromkeys(("recipe", "margin", "amax_history_len", "amax_compute_algo", "tp_only_amax_red"), _POWERS),
    **dict.fromkeys(("mode=blockwise", "mode=hybrid"), f"e4m3 is used for all values, and {_POWERS}"),
    **dict.fromkeys(("param", "direct_convert"), "weights stay in actor.dtype; with actor.use_lora they are in FP8"),
    **dict.fromkeys(("dot_product_attention", "multi_head_attention"), "attention computes in actor.dtype"),
    "include_experts": "experts have no products in FP8",
    "use_triton": "FP8 units multiply through torch._scaled_mm, and few rows in Triton",
}

_OF_ROLLOUT = {
    "backend": _OWN_ENGINE,
    "queue_size": "unfinished samples wait in the run itself; rollout.prompts_ahead is the number of prompts ahead",
    "consumer_batch_size": "a step trains on train_dataset.batch_size prompts",
    "check_trajectory_format": "trajectories are always checked",
    "enable_rollout_tracing": "rollout.dump_to_file=true keeps every sample, and perf_tracer.enabled=true its times",
    "tokenizer_path": "see tokenizer_path",
    "return_routed_experts": "see actor.routing_replay",
    "request_timeout": "agent.timeout_s limits the requests of agents",
    "request_retries": f"{_NO_SERVERS} whose requests could fail; a run continues after a failure, see recover.retries",
    "pause_grace_period": "samples stop between two decoding steps, so nothing has to be waited for",
    **dict.fromkeys(("use_lora", "lora_name"), _ONE_ADAPTER),
    **dict.fromkeys(("_version", "scheduling_spec", "scheduling_strategy"), _OWN_PROCESSES),
    **dict.fromkeys(("setup_timeout", "workers_ready_timeout"), _TIMEOUT),
    **dict.fromkeys(("model", "routing_strategy"), _NO_SERVERS),
    **dict.fromkeys(("poll_interval", "admin_api_key", "api_url", "provider_api_key"), _NO_SERVERS),
}

_OF_AGENTS = {
    "admin_api_key": f"{_SECRET} ARENO_ADMIN_API_KEY",
    "chat_template_type": "a conversation continues with the tokens that were sampled, and only what is new is encoded",
    "scheduling_spec": _OWN_PROCESSES,
}

_OF_DATASETS = {
    **dict.fromkeys(("num_workers", "pin_memory", "num_dataset_workers"), _NO_LOADERS),
    **dict.fromkeys(("scheduling_spec", "setup_timeout"), _NO_LOADERS),
    "type": "the recipe decides what the rows are for, such as dpo or sft",
}

_OF_FILES = {
    **{name: f"a run has one for all of its parts, set by {name}" for name in ("experiment_name", "trial_name")},
    "fileroot": "a run has one for all of its parts, set by cluster.fileroot",
}

_OF_SERVICES = {
    "stats_logger.wandb.wandb_api_key": f"{_SECRET} WANDB_API_KEY",
    "stats_logger.swanlab.api_key": f"{_SECRET} SWANLAB_API_KEY",
    "stats_logger.wandb.id_suffix": "the id of a run is kept in its folder, in trackers.json",
    **_texts_by_key(
        ("stats_logger.wandb", "stats_logger.swanlab"), {"config": "a run is always sent with all its settings"}
    ),
}

_MODELS = ("actor", "ref", "critic")

NOT_HERE = {
    **_RUN,
    **_texts_by_key(_MODELS, _OF_MODELS),
    "teacher.engine_type": "the teacher is a model of the run, beside the actor; it needs no engine of its own",
    "teacher.rollout": "the teacher is a model of the run, which scores rows as the actor does; see teacher.path",
    "teacher.train": "the teacher is never trained; see teacher.path",
    "actor.dtype=float16": "float16 needs a loss scale, which areno does not have",
    "scheduler.type=slurm": "start Ray on the nodes that Slurm gave you, and set scheduler.type=ray",
    **_texts_by_key(("actor", "ref"), dict.fromkeys(("log_agent_stats", "log_agent_stats_keys"), _AGENTS)),
    **_texts_by_key(("actor", "ref"), {"max_new_tokens": "see gconfig.max_new_tokens"}),
    **_texts_by_key(("actor.reward_norm", "actor.adv_norm"), {"group_size": "a group is the samples of a prompt"}),
    **_texts_by_key(
        ("critic",), dict.fromkeys(("use_lora", "lora_rank", "lora_alpha", "target_modules", "peft_type"), _NO_LORA)
    ),
    **dict.fromkeys((f"{section}.fp8_config" for section in ("critic", "reward", "teacher")), _NO_FP8),
    **dict.fromkeys((f"critic.{engine}.fp8_config.mode" for engine in ("archon", "megatron")), _NO_FP8),
    **_texts_by_key(("actor.mb_spec", "critic.mb_spec"), _OF_MICRO_BATCHES),
    **_texts_by_key(("actor.optimizer", "critic.optimizer"), _OF_OPTIMIZERS),
    **_texts_by_key(("rollout",), _OF_ROLLOUT),
    **_texts_by_key(("actor.fp8_config", "actor.archon.fp8_config", "actor.megatron.fp8_config"), _OF_FP8),
    **_texts_by_key(("agent",), _OF_AGENTS),
    **_texts_by_key(
        ("gconfig", "eval_gconfig"), {"lora_name": _ONE_ADAPTER, "use_beam_search": "there is no beam search"}
    ),
    **_texts_by_key(("train_dataset", "valid_dataset"), _OF_DATASETS),
    **_texts_by_key((*_MODELS, "rollout", "saver", "evaluator", "recover", "stats_logger", "perf_tracer"), _OF_FILES),
    **_OF_SERVICES,
}
"""Dotted key -> hint. The key may be `key=value`, for a value that the setting does not accept."""


def setting_hint(
    key: str,
    variant: tuple[str, Path] | None = None,
    cls: type[Section] | None = None,
    value_of: Callable[[str], Any] = lambda key: None,
) -> str:
    """Return a hint to append to an error about an unknown setting. It begins with "; ", or is "" if there is none.

    `key` may be `key=value`, for a known setting that does not accept this value. `variant` is (name, file) of the
    choice `variant=name`. If `cls` is given, the hint names only settings of this algorithm. `value_of` returns a
    setting's value.
    """
    here = _setting_keys(cls) if cls is not None else all_setting_keys()
    section, _, name = key.partition(".")
    if (
        section in ("actor", "ref", "critic", "rollout")
        and name == "backend"
        and (layout := _areal_layout(value_of(key)))
    ):
        return f"; areno has an engine of its own, which does the same with {layout}"
    if key == "actor.importance_sampling_level" and "actor.eps_clip" in here:
        return "; gspo always takes the ratio of a sequence, and grpo has this setting"
    if found := [ours for ours in settings_of_other_tool(key) if ours in here]:
        return f"; here it is {join_by_and(found)}"
    if key in NOT_HERE:
        return (
            f"; {NOT_HERE[key]}"
            if _applies_to_algorithm(NOT_HERE[key], here)
            else "; this algorithm has nothing like it"
        )
    names = _recipes_with(key)
    told = f"; it is a setting of {join_by_and(names)}" if names else ""
    for other in ("actor", "gconfig"):
        if not told and section in ("actor", "ref", "critic") and f"{other}.{name}" in here:
            told = f"; {section} has none of its own, see {other}.{name}"
    told = told or ("; this algorithm has nothing like it" if settings_of_other_tool(key) else "")
    return told + (f"; variant={variant[0]} sets it" if variant and _file_sets_key(variant[1], key) else "")


def settings_of_other_tool(key: str) -> tuple[str, ...]:
    """Return our settings that correspond to a name in another tool. Empty for an unknown name."""
    name = key.removeprefix("actor_rollout_ref.")
    section, _, inner = name.partition(".")
    plain = inner if section in ("actor", f"{section}.optimizer") else name.removeprefix("actor.optimizer.")
    return COUNTERPARTS.get(name) or COUNTERPARTS.get(plain.removeprefix("optimizer.")) or ()


def _areal_layout(backend: Any) -> str:
    """Return our settings that correspond to a backend string of AReaL, such as fsdp:d4t2, or ""."""
    runs = ["".join(run) for _, run in itertools.groupby(str(backend).partition(":")[2], str.isdigit)]
    if not runs or len(runs) % 2 or not all(size.isdigit() for size in runs[1::2]):
        return ""
    sizes = dict(zip(runs[::2], map(int, runs[1::2]), strict=True))
    copies, tp, cp = sizes.pop("d", 1), sizes.pop("t", 1), sizes.pop("c", 1)
    if any(size > 1 for size in sizes.values()):  # pipelines and experts have no counterpart
        return ""
    more = "".join(f" engine.{name}_size={size}" for name, size in (("tp", tp), ("cp", cp)) if size > 1)
    return f"engine.world_size={copies * tp * cp}{more}"


def _applies_to_algorithm(text: str, here: frozenset[str]) -> bool:
    """Return whether a hint names no setting, or at least one of `here`, the settings of an algorithm."""
    words = "".join(letter if letter.isalnum() or letter in "._" else " " for letter in text).split()
    named = [key for key in words if key in all_setting_keys()]
    return not named or any(key in here for key in named)


@cache
def _setting_keys(cls: type[Section]) -> frozenset[str]:
    return frozenset(row.key for row in setting_rows(cls))


@cache
def _setting_keys_of_algorithm(algorithm: str) -> frozenset[str]:
    with suppress(Exception):  # the message is about the user's key, and not about a package that is broken
        return _setting_keys(get_algorithm(algorithm).config)
    return frozenset()


def all_setting_keys() -> frozenset[str]:
    return frozenset().union(*map(_setting_keys_of_algorithm, algorithm_names()))


def _recipes_with(key: str) -> list[str]:
    return [name for name in algorithm_names() if key in _setting_keys_of_algorithm(name)]


def _file_sets_key(file: Path, key: str) -> bool:
    value = load_yaml(file)
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def join_by_and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
