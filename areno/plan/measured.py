"""Comparison of a forecast with the times and the peaks of memory that a run has recorded. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.plan.forecast import Forecast
from areno.plan.phases import Phase, rows_of_step

STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The predicted and the measured time and memory of one phase.

    Attributes:
        name: Name of the phase as in `Phase.name`, or "step" for a whole step.
        seconds: (predicted seconds, median of the measured seconds).
        gib: (predicted peak of memory, largest measured peak), in GiB.
    """

    name: str
    seconds: tuple[float, float]
    gib: tuple[float, float]

    def __str__(self) -> str:
        of_seconds = " / ".join(f"{value:.3g}" for value in self.seconds)
        return f"{self.name} {of_seconds} s, peak {self.gib[0]:.2f} / {self.gib[1]:.2f} GiB"


def measured_lengths(config: ExperimentConfig, metrics: Mapping[str, Sequence[float]]) -> tuple[int, int] | None:
    """Return the mean lengths in the recorded steps: (tokens of a prompt, tokens of an answer).

    The rows of a run without a rollout have no recorded lengths. The number of trained tokens gives the length of a
    row, half of which counts as the prompt.

    Args:
        config: Settings of the run.
        metrics: Name of a scalar -> its recorded values.

    Returns:
        The lengths, each at least 1. None if the run has not recorded them.
    """
    if isinstance(config, PolicyExperimentConfig):
        names = ("rollout/seq_len_mean", "rollout/response_len_mean")
        if any(not metrics.get(name) for name in names):
            return None
        row, answer = (statistics.fmean(metrics[name]) for name in names)
    else:
        speeds, seconds = metrics.get("train/tokens_per_second"), metrics.get("time/train")
        if not speeds or not seconds:
            return None
        n_tokens = [speed * time for speed, time in zip(speeds, seconds, strict=False)]
        row = statistics.fmean(n_tokens) / rows_of_step(config)
        answer = row / 2
    return max(1, round(row - answer)), max(1, round(answer))


def compare(found: Forecast, metrics: Mapping[str, Sequence[float]]) -> list[Compared]:
    """Compare the phases of a forecast with the recorded scalars time/* and memory/*.

    Args:
        found: The forecast.
        metrics: Name of a scalar -> its recorded values.

    Returns:
        One entry for each phase that the run has recorded, and one for the whole step. The predicted time of the step
        is the sum over these phases. Empty if no phase was recorded.
    """
    phases = [each for phase in found.phases for each in _compared(phase, metrics)]
    if not phases or not metrics.get("time/step"):
        return []
    seconds = sum(phase.seconds[0] for phase in phases), statistics.median(metrics["time/step"])
    gib = max(phase.gib[0] for phase in phases), max(phase.gib[1] for phase in phases)
    return [*phases, Compared(name=STEP, seconds=seconds, gib=gib)]


def _compared(phase: Phase, metrics: Mapping[str, Sequence[float]]) -> Iterator[Compared]:
    seconds, peaks = (metrics.get(f"{name}/{phase.clock}") for name in ("time", "memory"))
    if seconds and peaks:
        both = phase.seconds, statistics.median(seconds)
        yield Compared(name=phase.name, seconds=both, gib=(phase.peak / 2**30, max(peaks)))
