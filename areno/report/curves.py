"""The charts of a report: their order, their headings, and the units of scalars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from areno.tracking.reader import loss_is_meaningful

# Unit -> patterns of scalar names. The first match counts.
_UNITS = {
    "s": ("time/*", "*_time_s"),
    "share": (
        "*/accuracy*",
        "*/pass@*",
        "*/avg@*",
        "*frac*",
        "*/truncated",
        "*/clip_ratio",
        "*/clipfrac",
        "*_changed",
        "*/ranking_accuracy",
        "*/explained_variance",
        "*/sapo_gate",
    ),
    "tokens/s": ("*tokens_per_second",),
    "tokens": ("*_len_mean", "*_len"),
    "samples": (
        "*/num_sequences",
        "*/reward_errors",
        "*/reward_timeouts",
        "*/reward_not_finite",
        "*/agent_errors",
        "*/agent_timeouts",
        "*/agent_filtered",
        "*/agent_over_budget",
    ),
    "prompts": ("*skipped_long", "*/dropped_groups"),
    "updates": ("*skipped_steps",),
    "nats": ("*/entropy", "*logp*", "*kl", "*/kl_loss"),
    "loss": ("*loss*",),
    "reward": ("*reward*", "*/critic_value_*", "*/critic_returns_*", "*/margin"),
    "GiB": ("*memory_gib", "memory/*"),
    "learning rate": ("*/lr", "*_lr"),
    "norm": ("*grad_norm",),
    "ratio": ("*/ratio_*",),
}
_COUNTS = ("tokens/s", "tokens", "samples", "prompts", "updates")


def unit_of(name: str) -> str:
    """Return the unit of a scalar, such as "tokens". If it is unknown, return the last part of the scalar's name."""
    for unit, patterns in _UNITS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return unit
    return name.rpartition("/")[2].replace("_", " ")


def is_count(unit: str) -> bool:
    """Return whether values in a unit are counts, such as tokens. Counts are shown in a short form, such as 15k."""
    return unit in _COUNTS


@dataclass(frozen=True)
class Chart:
    """One chart of a report, whose scalars share one unit."""

    title: str
    names: tuple[str, ...]
    stacked: bool = False  # the scalars are parts of a sum

    @property
    def unit(self) -> str:
        return unit_of(self.names[0])

    @property
    def shows_counts(self) -> bool:
        return is_count(self.unit)


# In the order of the page. A chart shows those of its scalars that a run has recorded.
_CHARTS = {
    "Learning": [
        Chart("Reward", ("rollout/rewards_mean",)),
        Chart("Accuracy", ("rollout/accuracy", "eval/accuracy")),
        Chart("Evaluation: reward", ("eval/rewards_mean",)),
        Chart("Loss", ("train/loss", "eval/loss")),
        Chart("Groups without a difference", ("rollout/frac_groups_zero_std",)),
    ],
    "Answers": [
        Chart("Response length", ("rollout/response_len_mean", "eval/response_len_mean")),
        Chart("Truncated answers", ("rollout/truncated", "eval/truncated")),
        Chart("Rewards that failed", ("rollout/reward_errors", "rollout/reward_timeouts")),
    ],
    "Policy": [
        Chart("Entropy", ("train/entropy",)),
        Chart("KL to the reference", ("train/kl", "rollout/ref_kl", "train/kl_loss")),
        Chart("Clipped", ("train/clip_ratio", "train/clipfrac", "train/clip_frac")),
        Chart("Gradient norm", ("train/grad_norm",)),
        Chart("Learning rate", ("train/lr",)),
        Chart("Rollout against training: log-probabilities", ("train/logp_abs_diff_mean",)),
        Chart("Loss of the policy", ("train/loss",)),
    ],
    "Critic": [
        Chart("Explained variance", ("train/explained_variance",)),
        Chart("Loss of the critic", ("train/critic_loss",)),
    ],
    "Speed and memory": [
        Chart("Time of a step, by phase", (), stacked=True),
        Chart("Tokens per second", ("rollout/tokens_per_second", "train/tokens_per_second")),
        Chart("Peak memory of a device or process, by phase", ("train/memory_gib",)),
        Chart("Host memory of all processes", ("train/host_memory_gib",)),
    ],
}
_LOSS, _LOSS_OF_POLICY = "Loss", "Loss of the policy"  # a run has one of the two charts
_TIMES, _WHOLE_TIME = "time/", "time/step"
_PEAKS, _WHOLE_PEAK = "memory/", "train/memory_gib"


def charts_by_heading(names: Iterable[str], n_runs: int = 1) -> dict[str, list[Chart]]:
    """Group recorded scalars into charts. Returns heading -> charts, in the order of the page.

    Each scalar without a predefined chart gets its own chart under the heading "More". For one run, one chart stacks
    the durations of the phases of a step, and one chart has the peak of memory in each phase. For several runs, these
    charts show only the whole step.
    """
    there = set(names)
    loss = _LOSS_OF_POLICY if loss_is_meaningful(there) else _LOSS
    phases = tuple(sorted(name for name in there if name.startswith(_TIMES) and name != _WHOLE_TIME))
    found: dict[str, list[Chart]] = {}
    for heading, known in _CHARTS.items():
        found[heading] = []
        for chart in known:
            if chart.stacked:
                chart = Chart(chart.title, phases, True) if n_runs == 1 else Chart("Time of a step", (_WHOLE_TIME,))
            if chart.names == (_WHOLE_PEAK,) and n_runs == 1:
                peaks = sorted(name for name in there if name.startswith(_PEAKS))
                chart = Chart(chart.title, (_WHOLE_PEAK, *peaks))
            if kept := tuple(name for name in chart.names if name in there and chart.title != loss):
                found[heading].append(Chart(chart.title, kept, chart.stacked))
    shown = {name for of in found.values() for chart in of for name in chart.names}
    rest = sorted(there - shown - {_WHOLE_TIME})
    found["More"] = [Chart(name, (name,)) for name in rest]
    return {heading: kept for heading, kept in found.items() if kept}
