"""Evaluation of a run: measures its validation sets, and decides when to stop early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from areno.config.experiments import ExperimentConfig, metric_problems
from areno.data.loader import BatchLoader
from areno.errors import ConfigError
from areno.run.progress import Trigger

Measure = Callable[[str, BatchLoader[Any]], dict[str, float]]
"""(name of a validation set, its batches) -> its metrics by name."""


class Evaluator:
    """Measures the validation sets of a run, and remembers the best value of evaluator.metric.

    Args:
        config: Settings of the run.
        loaders: The sets by name. A single set may have the name "". Empty evaluates nothing.
        measure: Measures one set.

    Attributes:
        due: Returns whether to evaluate after a step, see Trigger.due.
        metric: The metric that early stopping watches.
        evaluated_step: The step of the last evaluation; None before the first.
        best: The best value of the metric so far.
        best_step: The step of the best value.
        n_without: Consecutive evaluations without an improvement.

    Raises:
        ConfigError: evaluator.metric is not among the measured metrics.
    """

    def __init__(self, config: ExperimentConfig, loaders: Mapping[str, BatchLoader[Any]], measure: Measure):
        if loaders and (problems := list(metric_problems(config, loaders))):
            raise ConfigError(problems)
        self.config, self._loaders, self._measure = config.evaluator, loaders, measure
        self.trigger = Trigger(config.evaluator)
        self.due = self.trigger.due
        self.metric = config.evaluator.metric or next(iter(config.eval_metrics()), "")
        self.evaluated_step: int | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self.n_without = 0

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure every validation set.

        Args:
            step: The current step.

        Returns:
            Metrics by name: <set>/<metric> of each set, and <metric> as the mean over the sets. A single set without a
            name has only <metric>. Empty without validation sets.
        """
        if not self._loaders:
            return {}
        found = {name: self._measure(name, loader) for name, loader in self._loaders.items()}
        scalars = found[""] if found.keys() == {""} else over_sets(found)
        self.evaluated_step = step
        self._compare(step, scalars.get(self.metric, math.nan))
        return scalars

    def _compare(self, step: int, value: float) -> None:
        less_is_better = self.config.mode == "min" or (self.config.mode is None and self.metric.endswith("loss"))
        gain = math.inf if self.best is None else (self.best - value if less_is_better else value - self.best)
        if not math.isnan(value) and gain > self.config.min_delta:
            self.best, self.best_step, self.n_without = value, step, 0
        else:
            self.n_without += 1

    @property
    def is_exhausted(self) -> bool:
        """Whether the last evaluator.patience evaluations brought no improvement, so that the run should end."""
        return self.config.patience is not None and self.n_without >= self.config.patience

    def describe(self) -> str:
        """Return how many evaluations had no improvement, and the best value, in words."""
        best = "" if self.best is None else f" (best {self.best:.6g}, step {self.best_step})"
        return f"eval/{self.metric} has not improved in {self.n_without} evaluations{best}"

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a state."""
        return {
            "trigger": self.trigger.state_dict(),
            "evaluated_step": self.evaluated_step,
            "best": self.best,
            "best_step": self.best_step,
            "n_without": self.n_without,
            "loaders": {name: loader.state_dict() for name, loader in self._loaders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the counters of a state. Validation sets that were added or removed since are ignored."""
        self.trigger.load_state_dict(state["trigger"])
        self.evaluated_step, self.n_without = state["evaluated_step"], state["n_without"]
        self.best, self.best_step = state["best"], state["best_step"]
        for name in self._loaders.keys() & state["loaders"].keys():
            self._loaders[name].load_state_dict(state["loaders"][name])


def over_sets(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several validation sets.

    Args:
        found: Set -> metric -> value.

    Returns:
        <metric>: the mean over the sets that have the metric. Sets of any size count the same; num_sequences is a sum.
        <set>/<metric>: the value of one set.
    """
    scalars: dict[str, float] = {}
    for metric in dict.fromkeys(metric for metrics in found.values() for metric in metrics):
        values = [metrics[metric] for metrics in found.values() if metric in metrics]
        scalars[metric] = sum(values) / (1 if metric == "num_sequences" else len(values))
    return scalars | {f"{name}/{metric}": value for name, metrics in found.items() for metric, value in metrics.items()}
