"""Units of scalars, for the axes of charts and the rows of tables."""

from __future__ import annotations

from fnmatch import fnmatchcase

# Unit -> the scalars that have it. The first match counts.
_UNITS = {
    "s": ("time/*", "*_time_s"),
    "share": (
        "*/accuracy*", "*/pass@*", "*/avg@*", "*frac*", "*/truncated", "*/clip_ratio", "*/clipfrac", "*_changed",
        "*/ranking_accuracy", "*/explained_variance", "*/sapo_gate",
    ),
    "tokens/s": ("*tokens_per_second",),
    "tokens": ("*_len_mean", "*_len"),
    "samples": ("*/num_sequences", "*/reward_errors", "*/reward_timeouts", "*/reward_not_finite", "*/agent_errors",
                "*/agent_timeouts", "*/agent_filtered"),
    "prompts": ("*skipped_long", "*/dropped_groups"),
    "updates": ("*skipped_steps",),
    "loss": ("*loss*",),
    "nats": ("*/entropy", "*logp*", "*kl"),
    "reward": ("*reward*", "*/critic_value_*", "*/critic_returns_*", "*/margin"),
    "GiB": ("*memory_gib",),
    "learning rate": ("*/lr", "*_lr"),
    "norm": ("*grad_norm",),
    "ratio": ("*/ratio_*",),
}  # fmt: skip
_COUNTS = ("tokens/s", "tokens", "samples", "prompts", "updates")


def unit_of(name: str) -> str:
    """Return the unit of a scalar; the last word of its name if the unit is not known."""
    for unit, patterns in _UNITS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return unit
    return name.rpartition("/")[2].replace("_", " ")


def is_count(unit: str) -> bool:
    """Return whether numbers of this unit are counts, which may be shown as 15k."""
    return unit in _COUNTS
