"""What a setting that a recipe does not have may be: that of another recipe, or of something that areno has not."""

from __future__ import annotations

from pathlib import Path

from areno.api.algorithms import get_algorithm
from areno.config.schema.fields import rows
from areno.files.small_yaml import plain_yaml

RECIPES = ("sft", "dpo", "grpo", "gspo", "ppo")

_OWN_ENGINE = "areno has an engine of its own; see the settings of engine and rollout"
_OWN_PROCESSES = "areno starts its processes itself; see engine.world_size and engine.tp_size"
_NO_LORA = "adapters are for the actor; the critic is trained whole"
_SECRET = "it would be kept in the files of the run; set the environment variable"
NOT_HERE = {
    "teacher": "there is no distillation from a teacher yet",
    "tune": "memory is not tuned by a trial run; see actor.mb_spec and rollout.mem_fraction",
    "perf_tracer": "there is no tracer; the times of a step are logged as time/*",
    "memory_profiler": "there is no profiler; the memory of a step is logged as train/memory_gib",
    "rollout.agent": "the settings of agents are agent.fn, agent.timeout_s, agent.workers, agent.train_tool_results",
    "rollout.max_head_offpolicyness": "rollout and training take turns, so samples are never stale",
    **dict.fromkeys(("sglang", "vllm", "megatron", "fsdp", "archon"), _OWN_ENGINE),
    **dict.fromkeys(("launcher", "name_resolve", "allocation_mode"), _OWN_PROCESSES),
    **dict.fromkeys([f"critic.{name}" for name in ("use_lora", "lora_rank", "lora_alpha", "target_modules")], _NO_LORA),
    "stats_logger.wandb.wandb_api_key": f"{_SECRET} WANDB_API_KEY",
    "stats_logger.swanlab.api_key": f"{_SECRET} SWANLAB_API_KEY",
    "stats_logger.wandb.id_suffix": "the id of a run is kept in its folder, in trackers.json",
    **dict.fromkeys(
        [f"stats_logger.{name}.config" for name in ("wandb", "swanlab")], "a run is always sent with all its settings"
    ),
}


def hint(key: str, variant: tuple[str, Path] | None = None) -> str:
    """The end of a message about the unknown setting `key`; "" where nothing is known of it.

    variant: the chosen one and its file, which may be what sets it.
    """
    if key in NOT_HERE:
        return f"; {NOT_HERE[key]}"
    names = [name for name in RECIPES if any(row.key == key for row in rows(get_algorithm(name).config))]
    told = f"; it is a setting of {listed(names)}" if names else ""
    return told + (f"; variant={variant[0]} sets it" if variant and _sets(variant[1], key) else "")


def _sets(file: Path, key: str) -> bool:
    """Whether a YAML file has a value for a dotted key."""
    value = plain_yaml(file)
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
