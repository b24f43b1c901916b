"""What differs between the settings that a run began with and those that it goes on with, and whether it may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from areno.config.schema.build import with_defaults
from areno.config.schema.fields import Section
from areno.config.schema.values import show

Kind = Literal["harmless", "later", "never"]

_END = "where the run ends, and with lr_decay_steps=null the learning rate from here on"
_SPEED = "speed and memory change; results up to the order of floating-point sums"
_FROM_HERE = "from here on"
_SAME = "nothing, if it is the same model or data in another place"

# Of the longest of these that is the key or a section of it. harmless: the samples and updates stay what they would
# have been, but for a learning rate that follows the length of the run. never: what the state holds does not fit. Other
# settings change the run from here on.
_KINDS: dict[str, tuple[Kind, str]] = {
    **dict.fromkeys(("total_train_steps", "total_train_epochs", "total_train_n_seqs"), ("harmless", _END)),
    "evaluator.patience": ("harmless", _END),
    **dict.fromkeys(("saver", "evaluator", "recover", "stats_logger"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("valid_dataset", "eval_gconfig"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("rollout.dump_to_file", "rollout.dump_n_samples"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("actor.max_skipped_steps", "reward.timeout_s"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("experiment_name", "trial_name", "cluster"), ("harmless", "nothing: the run keeps its folder")),
    **dict.fromkeys(
        (
            "engine", "scheduler", "cluster.n_nodes", "cluster.n_gpus_per_node",
            "rollout.max_prefill_tokens", "rollout.mem_fraction", "rollout.max_kv_tokens",
            "rollout.eager_decode", "rollout.max_concurrent_rollouts", "rollout.drop_rollout_state", "reward.workers",
            "reward.offload", "ref.offload", "critic.offload", "actor.mb_spec", "critic.mb_spec",
            "actor.gradient_checkpointing", "critic.gradient_checkpointing",
        ),
        ("harmless", _SPEED),
    ),
    **dict.fromkeys(("actor.path", "actor.init_lora_from", "tokenizer_path"), ("harmless", _SAME)),
    **dict.fromkeys(("train_dataset.path", "train_dataset.loader"), ("harmless", _SAME)),
    **dict.fromkeys(
        ("critic.path", "critic.init_from_scratch"), ("harmless", "nothing: the critic comes from the state")
    ),
    **dict.fromkeys(
        (
            "seed", "train_dataset", "actor.init_from_scratch", "engine.dummy_load", "actor.optimizer.type",
            "critic.optimizer.type", "actor.use_lora", "actor.lora_rank", "actor.lora_alpha", "actor.target_modules",
            "actor.use_rslora",
        ),
        ("never", ""),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One setting that differs. kind: see above. effect: what the change means for the run."""

    key: str
    before: Any
    now: Any
    kind: Kind
    effect: str

    @property
    def is_end(self) -> bool:
        """Whether it is about how long the run goes on."""
        return self.effect == _END

    @property
    def override(self) -> str:
        """What a command line says to make the change."""
        return f"{self.key}={'...' if isinstance(self.now, Mapping) else show(self.now)}"

    def __str__(self) -> str:
        before, now = ("a section" if isinstance(value, Mapping) else show(value) for value in (self.before, self.now))
        return f"{self.key} {before} -> {now}"


def changes(cls: type[Section], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that differ, in the order of the fields. A setting that `before` has not had its default then."""
    pairs = _differences(with_defaults(cls, before), with_defaults(cls, now))
    return [Change(key, old, new, *_kind(key)) for key, old, new in pairs]


def _kind(key: str) -> tuple[Kind, str]:
    section = key
    while section not in _KINDS and section:
        section = section.rpartition(".")[0]
    return _KINDS.get(section, ("later", _FROM_HERE))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value); of a section that is null on one side, only its own key."""
    for name in {**new, **old}:
        one, other = old.get(name), new.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{prefix}{name}.")
        elif one != other:
            yield f"{prefix}{name}", one, other
