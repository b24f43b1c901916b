"""The weights of sources that change during a run, and prompts that rest (train_dataset.curriculum)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from areno.config.sources import CurriculumConfig, SourceConfig


@dataclass(frozen=True)
class GroupResult:
    """What a step has seen of a prompt."""

    source: str
    row: int
    rewards: list[float]  # of its samples that have one
    advantages: list[float]  # of the same samples, each the mean over its tokens


class Curriculum:
    """Decides the weights of sources, and which rows rest. It learns from the results of each step.

    `values` holds Q of each source for the bandit. `awake_from` holds, for each source, the epoch of the source from
    which a resting row is drawn again.
    """

    def __init__(self, config: CurriculumConfig, sources: Mapping[str, SourceConfig]):
        self._config, self._sources = config, sources
        self.values = dict.fromkeys(sources, 0.0)
        self.awake_from: dict[str, dict[int, int]] = {name: {} for name in sources}

    @property
    def changes_weights(self) -> bool:
        return self._config.type != "fixed" or any(each.final_weight is not None for each in self._sources.values())

    def weights(self, n_batches: int) -> dict[str, float]:
        """Return the weights for the batch after `n_batches` batches. Their sum is 1."""
        config = self._config
        done = min(1.0, n_batches / config.schedule_steps)
        found = {}
        for name, source in self._sources.items():
            found[name] = source.weight + (source.last_weight - source.weight) * done
        if config.type == "bandit":
            most = max(value for name, value in self.values.items() if found[name])
            factors = {name: math.exp(min(0.0, v - most) / config.temperature) for name, v in self.values.items()}
            found = {name: weight * factors[name] for name, weight in found.items()}
        total = sum(found.values())
        return {name: weight / total for name, weight in found.items()}

    def learn(self, results: Iterable[GroupResult], epochs_begun: Mapping[str, int]) -> None:
        """Learn from the groups of a step. `epochs_begun` counts those of each source."""
        config, results = self._config, list(results)
        for name in self.values:
            sizes = [abs(each) for result in results if result.source == name for each in result.advantages]
            if sizes:
                self.values[name] += config.learning_rate * (math.fsum(sizes) / len(sizes) - self.values[name])
        for result in results if config.rest_epochs else ():
            if not result.rewards:
                continue
            mean = math.fsum(result.rewards) / len(result.rewards)
            if mean >= config.solved or mean <= config.hopeless:
                self.awake_from[result.source][result.row] = epochs_begun[result.source] + config.rest_epochs
            else:
                self.awake_from[result.source].pop(result.row, None)

    def n_resting(self, source: str, epoch: int) -> int:
        return sum(awake_from > epoch for awake_from in self.awake_from[source].values())

    def state_dict(self) -> dict[str, Any]:
        resting = {name: [[row, epoch] for row, epoch in rows.items()] for name, rows in self.awake_from.items()}
        return {"values": dict(self.values), "awake_from": resting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Sources that were not there begin anew."""
        self.values |= {name: value for name, value in state["values"].items() if name in self.values}
        for name in self.awake_from.keys() & state["awake_from"].keys():
            self.awake_from[name] = dict(map(tuple, state["awake_from"][name]))
