"""Batches from several sources of prompts (train_dataset.sources), in which each source has a share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from areno.data.curriculum import Curriculum, GroupResult
from areno.data.loader import BatchLoader
from areno.errors import ConfigError, Problem
from areno.types import Batch, PromptItem

_DIGITS = 9  # after which two sources are equally far behind


class ShareDealer:
    """Deals the places of batches to sources by largest remainder, of which the next batch takes what is left.

    After any number of batches, a source has its share of all places, up to less than one place. `owed` holds, for each
    source, the places that it should have had but has not had so far. It is negative after a place too many.
    """

    def __init__(self, names: Sequence[str]):
        self.owed = dict.fromkeys(names, 0.0)

    def deal(self, weights: Mapping[str, float], n_places: int) -> list[str]:
        total = sum(weights.values())
        for name in self.owed:
            self.owed[name] += weights[name] / total * n_places
        return [self._deal_one([name for name in self.owed if weights[name]]) for _ in range(n_places)]

    def _deal_one(self, names: Sequence[str]) -> str:
        name = max(names, key=lambda each: round(self.owed[each], _DIGITS))  # of equal ones the first
        self.owed[name] -= 1
        return name


class MixedLoader:
    """Iterates over batches of prompts from several sources. It has the methods of BatchLoader that a run needs.

    The k-th row of a source depends on the seed, on its name and on k alone, so it stays the same if other sources are
    added or have other weights. Only prompts that rest are left out. A source begins again after its last row. An epoch
    is over after as many rows as all sources have together.
    """

    def __init__(self, parts: Mapping[str, BatchLoader[PromptItem]], curriculum: Curriculum, batch_size: int):
        self.parts, self.curriculum, self.batch_size = dict(parts), curriculum, batch_size
        self._dealer = ShareDealer(list(parts))
        self._n_batches = 0

    @property
    def n_rows(self) -> int:
        return sum(loader.n_rows for loader in self.parts.values())

    @property
    def total_skipped_long(self) -> int:
        return sum(loader.total_skipped_long for loader in self.parts.values())

    def n_batches(self, n_epochs: int) -> int:
        return -(-n_epochs * self.n_rows // self.batch_size)

    @property
    def epoch(self) -> int:
        return self._n_batches * self.batch_size // self.n_rows

    def batches_until_epoch(self, n: int) -> Iterator[Batch[PromptItem]]:
        """Iterate over the batches from the current position to the end of the `n`-th epoch of the run."""
        while self._n_batches < self.n_batches(n):
            yield self._next_batch()

    def _next_batch(self) -> Batch[PromptItem]:
        epoch, resting = self.epoch, self.curriculum.awake_from
        places = self._dealer.deal(self.curriculum.weights(self._n_batches), self.batch_size)
        drawn = {name: self.parts[name].draw(places.count(name), resting[name]) for name in dict.fromkeys(places)}
        waiting = {name: iter(items) for name, (items, *_) in drawn.items()}
        self._n_batches += 1
        return Batch(
            items=[next(waiting[name]) for name in places],
            skipped_long=sum(long for _, long, _ in drawn.values()),
            total_skipped_long=self.total_skipped_long,
            epoch=epoch,
            ends_epoch=self.epoch > epoch,
        )

    def learn(self, results: Iterable[GroupResult]) -> None:
        self.curriculum.learn(results, {name: loader.epochs_begun for name, loader in self.parts.items()})

    def metrics(self) -> dict[str, float]:
        """Return the share of each source in the next batch, and how many of its prompts rest."""
        weights = self.curriculum.weights(self._n_batches) if self.curriculum.changes_weights else {}
        resting = {name: self.curriculum.n_resting(name, loader.epochs_begun) for name, loader in self.parts.items()}
        found = {f"rollout/{name}/weight": weight for name, weight in weights.items()}
        return found | {f"rollout/{name}/resting": float(n) for name, n in resting.items() if any(resting.values())}

    def items_at(self, places: Sequence[tuple[str, int]]) -> list[PromptItem]:
        """Return encoded rows by (source, index)."""
        return [item for place in places for item in self._part(place[0]).items_at([place])]

    def _part(self, name: str) -> BatchLoader[PromptItem]:
        if name not in self.parts:
            text = "has no source {}, of which the run to resume has prompts in progress; add it, with weight 0"
            raise ConfigError(Problem("train_dataset.sources", text, name))
        return self.parts[name]

    @property
    def encoder_pids(self) -> list[int]:
        return [pid for loader in self.parts.values() for pid in loader.encoder_pids]

    def close(self) -> None:
        for loader in self.parts.values():
            loader.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_batches": self._n_batches,
            "owed": dict(self._dealer.owed),
            "sources": {name: loader.state_dict() for name, loader in self.parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Sources that were not there begin with their first row."""
        if "sources" not in state:
            text = "is set, but the run to resume began with a single source; start a new run"
            raise ConfigError(Problem("train_dataset.sources", text))
        self._n_batches = state["n_batches"]
        for name, loader in self.parts.items():
            if name in state["sources"]:
                loader.load_state_dict(state["sources"][name])
                self._dealer.owed[name] = state["owed"][name]
