"""Evaluation of a run: computes the metrics of its validation sets, and decides when to stop early."""

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
    """Computes the metrics of a run's validation sets, and decides on early stopping.

    `loaders`: name of each validation set -> its batches. A single set may have the name "". Raises ConfigError if
    evaluator.metric or saver.best_metric is not one of the computed metrics.
    """

    def __init__(self, config: ExperimentConfig, loaders: Mapping[str, BatchLoader[Any]], measure: Measure):
        if loaders and (problems := list(metric_problems(config, loaders))):
            raise ConfigError(problems)
        self.config, self._loaders, self._measure = config.evaluator, loaders, measure
        self.trigger = Trigger(config.evaluator)
        self.due = self.trigger.is_due
        self.metric = config.evaluator.metric or next(iter(config.eval_metrics()), "")
        self.evaluated_step: int | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self.n_without = 0

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics <set>/<metric> of each validation set, and their means over the sets as <metric>.

        If there is a single set with the name "", return only <metric>.
        """
        if not self._loaders:
            return {}
        found = {name: self._measure(name, loader) for name, loader in self._loaders.items()}
        scalars = found[""] if found.keys() == {""} else mean_over_sets(found)
        self.evaluated_step = step
        if self.metric in scalars:  # it is not if no sample has a reward
            self._compare_with_best(step, scalars[self.metric])
        return scalars

    def _compare_with_best(self, step: int, value: float) -> None:
        less_is_better = self.config.mode == "min" or (self.config.mode is None and self.metric.endswith("loss"))
        gain = math.inf if self.best is None else (self.best - value if less_is_better else value - self.best)
        if not math.isnan(value) and gain > self.config.min_delta:
            self.best, self.best_step, self.n_without = value, step, 0
        else:
            self.n_without += 1

    @property
    def should_stop_early(self) -> bool:
        """Whether the run should end, because evaluator.patience evaluations in a row brought no improvement."""
        return self.config.patience is not None and self.n_without >= self.config.patience

    def describe_early_stop(self) -> str:
        best = "" if self.best is None else f" (best {self.best:.6g}, step {self.best_step})"
        return f"eval/{self.metric} has not improved in {self.n_without} evaluations{best}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "trigger": self.trigger.state_dict(),
            "evaluated_step": self.evaluated_step,
            "best": self.best,
            "best_step": self.best_step,
            "n_without": self.n_without,
            "loaders": {name: loader.state_dict() for name, loader in self._loaders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Ignores validation sets that were added or removed since then."""
        self.trigger.load_state_dict(state["trigger"])
        self.evaluated_step, self.n_without = state["evaluated_step"], state["n_without"]
        self.best, self.best_step = state["best"], state["best_step"]
        for name in self._loaders.keys() & state["loaders"].keys():
            self._loaders[name].load_state_dict(state["loaders"][name])


def mean_over_sets(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return <set>/<metric> of each set, and <metric>: the mean over the sets that have it (num_sequences: sum)."""
    scalars: dict[str, float] = {}
    for metric in dict.fromkeys(metric for metrics in found.values() for metric in metrics):
        values = [metrics[metric] for metrics in found.values() if metric in metrics]
        scalars[metric] = sum(values) / (1 if metric == "num_sequences" else len(values))
    return scalars | {f"{name}/{metric}": value for name, metrics in found.items() for metric, value in metrics.items()}
