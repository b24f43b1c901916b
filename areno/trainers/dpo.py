"""The training loop of DPO: compute reference log-probabilities of every pair once, then train on the pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from areno.config.experiments import PreferenceExperimentConfig
from areno.data.loader import BatchLoader
from areno.tracking.console import Progress
from areno.trainers.loop import ReferencedLoop
from areno.trainers.rows import trained_mask
from areno.trainers.update import measure_loss, update_actor
from areno.types import PairItem, TrainSequence

Scores = dict[int, tuple[np.ndarray, np.ndarray]]
"""Dataset index of a pair -> log-probabilities of all tokens of the chosen and of the rejected row, as float32."""


class DPOTrainer(ReferencedLoop[PreferenceExperimentConfig]):
    """Trains a model with DPO on chosen and rejected answers. Use it as a context manager, or call close()."""

    needs, kind = PreferenceExperimentConfig, "dpo"

    def train_step(self, items: Sequence[PairItem]) -> dict[str, float]:
        rows = [row for item in items for row in _rows_with_reference(item, self.ref_scores.get(item.index))]
        return update_actor(self.setup, rows, rows_per_unit=2)

    def clear_scores(self) -> None:
        self.ref_scores: Scores = {}
        self.valid_ref_scores: dict[str, Scores] = {name: {} for name in self.setup.valid_loaders}  # by set

    def score_all(self, role: str) -> str:
        self._score(role, self._pairs_to_train(), len(self.setup.loader.rows), self.ref_scores)
        for name, valid in self.setup.valid_loaders.items():
            batches = _batched(valid.items(), valid.batch_size)
            self._score(role, batches, len(valid.rows), self.valid_ref_scores[name])
        return f"{len(self.ref_scores) + sum(map(len, self.valid_ref_scores.values()))} pairs"

    def _pairs_to_train(self) -> Iterator[list[PairItem]]:
        """Yield the pairs that this run trains on, each once, in batches. Then reset the loader to its old position."""
        config, loader = self.setup.config, self.setup.loader
        before, seen = loader.state_dict(), set()
        for batch in itertools.islice(loader.batches(), self.n_batches()):
            seen.update(item.index for item in batch.items)
            yield batch.items
        more_epochs = loader.epoch != before["epoch"] and config.total_train_epochs > 1
        loader.load_state_dict(before)
        if more_epochs:  # each epoch has its own order, and drops other rows at its end
            left = (item for item in loader.items() if item.index not in seen)
            yield from _batched(left, config.train_dataset.batch_size)

    def _score(self, role: str, batches: Iterable[Sequence[PairItem]], n_rows: int, out: Scores) -> None:
        with Progress("reference", n_rows, unit="pairs") as progress:
            n_tokens = 0
            for items in batches:
                for item, chosen, rejected in self._logprobs(role, items):
                    out[item.index] = np.asarray(chosen, np.float32), np.asarray(rejected, np.float32)
                    n_tokens += len(chosen) + len(rejected)
                progress.update(len(out), n_tokens)

    def _logprobs(self, role: str, items: Sequence[PairItem]) -> Iterator[tuple[PairItem, list[float], list[float]]]:
        rows = [row for item in items for row in (item.chosen, item.rejected)]
        scored = self.row_logprobs(role, rows)
        return zip(items, scored[0::2], scored[1::2], strict=True)

    def measure(self, name: str, loader: BatchLoader[PairItem]) -> dict[str, float]:
        """Return loss, accuracy and margin, as in training (see dpo_loss_fn), and ranking_accuracy.

        ranking_accuracy is the share of pairs in which the actor alone makes the chosen answer more likely than the
        rejected one. A tie counts half.
        """
        rows: list[TrainSequence] = []
        logprobs: list[list[float]] = []
        for batch in loader.batches():
            for item, *scored in self._logprobs("actor", batch.items):
                rows += _rows_with_reference(item, self.valid_ref_scores[name].get(item.index))
                logprobs += scored
        measured = measure_loss(self.setup.loss_fn, rows, logprobs, rows_per_unit=2)
        pairs = zip(rows, logprobs, strict=True)
        answers = [np.asarray(scored)[trained_mask(row)].sum() for row, scored in pairs]
        ranked = (np.sign(np.subtract(answers[0::2], answers[1::2])) + 1) / 2
        kept = {name: measured[name] for name in ("loss", "accuracy", "margin")}
        return kept | {"ranking_accuracy": float(ranked.mean())}


def _batched(items: Iterator[PairItem], size: int) -> Iterator[list[PairItem]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _rows_with_reference(item: PairItem, scores: tuple[np.ndarray, np.ndarray] | None) -> list[TrainSequence]:
    pair = zip((item.chosen, item.rejected), scores or (None, None), strict=True)
    return [replace(row, ref_logprobs=of_row) for row, of_row in pair]
