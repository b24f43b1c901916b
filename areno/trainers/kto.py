"""The training loop of KTO, which trains on labelled answers and estimates the reference point of each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from areno.config.experiments import UnpairedExperimentConfig
from areno.data.loader import BatchLoader
from areno.tracking.console import Progress
from areno.trainers.loop import ReferencedLoop
from areno.trainers.rows import trained_mask
from areno.trainers.update import measure_loss, update_actor
from areno.types import AnswersItem, TrainSequence


@dataclass
class _ReferenceScores:
    rows: dict[int, np.ndarray] = field(default_factory=dict)  # by dataset index: logprobs, (n_tokens,) float32
    mismatched: dict[tuple[int, int], float] = field(default_factory=dict)  # by (index of prompt, index of answer)


class KTOTrainer(ReferencedLoop[UnpairedExperimentConfig]):
    """Trains a model with KTO on labelled answers. Use it as a context manager, or call close()."""

    needs, kind = UnpairedExperimentConfig, "kto"
    headline = (*ReferencedLoop.headline, "train/kl")

    def train_step(self, items: Sequence[AnswersItem]) -> dict[str, float]:
        with self.run.clock.phase("kl"):
            point = self.reference_point(items, self._scores)
        rows = [_with_scores(item, self._scores) for item in items]
        stats = update_actor(self.setup, rows, loss_fn=partial(self.setup.loss_fn, reference_point=point))
        stats["kl"] = point
        if "rewards_chosen_mean" in stats and "rewards_rejected_mean" in stats:
            stats["margin"] = stats["rewards_chosen_mean"] - stats["rewards_rejected_mean"]
        return stats

    def reference_point(self, items: Sequence[AnswersItem], scores: _ReferenceScores) -> float:
        """Estimate the reference point z0 of a step under the current policy, in nats. It is 0 for a single row.

        The estimate is the mean of log(policy / reference) over the mismatched answers of the step, or 0 if the mean is
        negative. It does not depend on micro-batches or on the number of devices.
        """
        if len(items) < 2:
            return 0.0
        rows, keys = self._mismatched_rows(items)
        ours = self._completion_logprobs("actor", rows)
        theirs = np.array([scores.mismatched[key] for key in keys])
        return max(0.0, float((ours - theirs).mean()))

    def _mismatched_rows(self, items: Sequence[AnswersItem]) -> tuple[list[TrainSequence], list[tuple[int, int]]]:
        """Join each prompt with the answer to the previous prompt. Return (rows, (prompt index, answer index) of each).

        The first prompt gets the last answer. Answers are truncated at the context length of the model.
        """
        most, rows, keys = self.setup.trainer.info.context_len, [], []
        for own, other in zip(items, [items[-1], *items[:-1]], strict=True):
            (prompt, _), (_, answer) = _prompt_and_completion(own.rows[0]), _prompt_and_completion(other.rows[0])
            tokens = np.concatenate([prompt[0], answer[0]])[:most]
            mask = np.concatenate([prompt[1], answer[1]])[:most]
            rows.append(TrainSequence(tokens=tokens, prompt_mask=mask))
            keys.append((own.index, other.index))
        return rows, keys

    def _completion_logprobs(self, role: str, rows: Sequence[TrainSequence]) -> np.ndarray:
        """Return the summed log-probability of each row's trained tokens under a role's model, float64 (rows,)."""
        pairs = zip(rows, self.row_logprobs(role, rows), strict=True)
        return np.array([np.asarray(values)[trained_mask(row)].sum() for row, values in pairs])

    def clear_scores(self) -> None:
        self._scores = _ReferenceScores()
        self._valid_scores = {name: _ReferenceScores() for name in self.setup.valid_loaders}

    def score_all(self, role: str) -> str:
        self._score(role, self._batches_to_train(), len(self.setup.loader.rows), self._scores)
        for name, valid in self.setup.valid_loaders.items():
            self._score(role, _batches_in_dataset_order(valid), len(valid.rows), self._valid_scores[name])
        found = [self._scores, *self._valid_scores.values()]
        n_rows, n_mismatched = sum(len(each.rows) for each in found), sum(len(each.mismatched) for each in found)
        return f"{n_rows} rows and {n_mismatched} mismatched answers"

    def _batches_to_train(self) -> Iterator[list[AnswersItem]]:
        """Yield the batches of the whole run. Then reset the loader to its old position."""
        config, loader = self.setup.config, self.setup.loader
        before = loader.state_dict()
        for batch in itertools.islice(loader.batches_until_epoch(config.total_train_epochs), self.n_batches()):
            yield batch.items
        loader.load_state_dict(before)

    def _score(self, role: str, batches: Iterable[Sequence[AnswersItem]], n_rows: int, out: _ReferenceScores) -> None:
        with Progress("reference", n_rows, unit="rows") as progress:
            n_tokens = 0
            for items in batches:
                new = [item for item in items if item.index not in out.rows]
                scored = self.row_logprobs(role, [item.rows[0] for item in new])
                for item, values in zip(new, scored, strict=True):
                    out.rows[item.index] = np.asarray(values, np.float32)
                    n_tokens += len(values)
                if len(items) > 1:
                    pairs = zip(*self._mismatched_rows(items), strict=True)
                    apart = [(row, key) for row, key in pairs if key not in out.mismatched]
                    sums = self._completion_logprobs(role, [row for row, _ in apart])
                    out.mismatched |= {key: float(value) for (_, key), value in zip(apart, sums, strict=True)}
                progress.update(len(out.rows), n_tokens)

    def measure(self, name: str, loader: BatchLoader[AnswersItem]) -> dict[str, float]:
        """Return loss, accuracy, kl (the mean reference point) and, if both labels occur, margin (see kto_loss_fn)."""
        scores, rows, points, weights = self._valid_scores[name], [], [], []
        for items in _batches_in_dataset_order(loader):
            points.append(self.reference_point(items, scores))
            weights.append(len(items))
            rows += [_with_scores(item, scores) for item in items]
        logprobs = self.row_logprobs("actor", rows)
        point = float(np.average(points, weights=weights))
        measured = measure_loss(partial(self.setup.loss_fn, reference_point=point), rows, logprobs)
        out = {"loss": measured["loss"], "accuracy": measured["accuracy"], "kl": point}
        gains = {True: [], False: []}
        for row, values in zip(rows, logprobs, strict=True):
            apart = (np.asarray(values) - row.ref_logprobs)[trained_mask(row)]
            gains[row.reward > 0.5].append(apart.sum())
        if gains[True] and gains[False]:
            beta = self.setup.loss_fn.keywords["beta"]  # type: ignore[attr-defined]
            out["margin"] = beta * (float(np.mean(gains[True])) - float(np.mean(gains[False])))
        return out


def _batches_in_dataset_order(loader: BatchLoader[AnswersItem]) -> Iterator[list[AnswersItem]]:
    """Yield a validation set in batches in the order of the dataset, so that the mismatched answers stay the same."""
    items = loader.items()
    while batch := list(itertools.islice(items, loader.batch_size)):
        yield batch


def _prompt_and_completion(row: TrainSequence) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Split a row at its first trained token into (tokens, prompt_mask) of the prompt and of the answer."""
    tokens, mask = np.asarray(row.tokens), np.asarray(row.prompt_mask)
    start = max(1, int(np.argmin(mask)))
    return (tokens[:start], mask[:start]), (tokens[start:], mask[start:])


def _with_scores(item: AnswersItem, scores: _ReferenceScores) -> TrainSequence:
    return replace(item.rows[0], ref_logprobs=scores.rows[item.index])
