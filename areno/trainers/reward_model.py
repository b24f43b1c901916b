"""The training loop of reward models, which learn to rank the answers to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from areno.config.experiments import RewardModelExperimentConfig
from areno.data.loader import BatchLoader
from areno.models.registry import load_config
from areno.trainers.loop import AnswerLoop
from areno.trainers.update import measure_loss, update_actor
from areno.types import AnswersItem, TrainSequence

_BINS = 10  # of the calibration error


class RewardModelTrainer(AnswerLoop[RewardModelExperimentConfig]):
    """Trains a reward model on ranked answers. Use it as a context manager, or call close()."""

    needs, kind = RewardModelExperimentConfig, "rw"

    def train_step(self, items: Sequence[AnswersItem]) -> dict[str, float]:
        rows, n_answers = self.rows(items)
        return update_actor(self.setup, rows, rows_per_unit=n_answers)

    @property
    def pad_token_id(self) -> int | None:
        """The padding token that is ignored at the end of a row, as transformers ignores it. None ignores none."""
        actor = self.setup.trainer.engine.spec.actor
        own = load_config(actor.path, "value").hf.get("pad_token_id")
        return actor.pad_token_id if own is None else own

    def rows(self, items: Sequence[AnswersItem]) -> tuple[list[TrainSequence], int]:
        """Return (K adjacent training rows for each item, K), where K is the largest number of answers of an item.

        Items with fewer answers are filled up with short rows that are not trained.
        """
        n_answers, pad, found = max(len(item.rows) for item in items), self.pad_token_id, []
        for item in items:
            found += [_scored_row(row, pad) for row in item.rows]
            found += [_untrained_row(found[-1])] * (n_answers - len(item.rows))
        return found, n_answers

    def measure(self, name: str, loader: BatchLoader[AnswersItem]) -> dict[str, float]:
        """Return the mean score (rewards_mean), calibration_error and the statistics of reward_model_loss_fn."""
        items = [item for batch in loader.batches() for item in batch.items]
        rows, n_answers = self.rows(items)
        own = [np.asarray(row.tokens)[:-1].tolist() for row in rows]  # without the token at which training reads
        scores = self.setup.trainer.score_rewards("actor", own)
        values = [[0.0] * len(tokens) + [score] for tokens, score in zip(own, scores, strict=True)]
        measured = measure_loss(self.setup.loss_fn, rows, values, rows_per_unit=n_answers)
        present = [score for row, score in zip(rows, scores, strict=True) if not np.all(row.prompt_mask)]
        pairs = _score_margins(rows, scores, n_answers)
        return {
            **{name: measured[name] for name in ("loss", "accuracy", "margin", "confidence")},
            "calibration_error": calibration_error(pairs),
            "rewards_mean": float(np.mean(present)),
        }


def calibration_error(margins: Sequence[float]) -> float:
    """Return the expected calibration error of comparisons (arXiv 1706.04599 eq. 3) with 10 bins.

    A margin is the score of the preferred answer minus the score of the other answer. The confidence of a comparison is
    sigmoid(|margin|), from 0.5 to 1. Comparisons of similar confidence share a bin. The error of a bin is |accuracy -
    mean confidence|, and the result is its mean over comparisons. A comparison with a margin of 0 counts as half right.
    """
    apart = np.asarray(margins, np.float64)
    confidence, right = 1 / (1 + np.exp(-np.abs(apart))), (np.sign(apart) + 1) / 2
    bins = np.minimum(((confidence - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    of_bins = [np.abs(right[bins == each].sum() - confidence[bins == each].sum()) for each in range(_BINS)]
    return float(np.sum(of_bins) / max(1, len(apart)))


def _score_margins(rows: Sequence[TrainSequence], scores: Sequence[float], n_answers: int) -> list[float]:
    """Return score(better) - score(worse) for each two of the `n_answers` rows of an item with different ratings."""
    found = []
    for start in range(0, len(rows), n_answers):
        of_unit = [index for index in range(start, start + n_answers) if not np.all(rows[index].prompt_mask)]
        for one, other in combinations(of_unit, 2):
            sign = np.sign(rows[one].reward - rows[other].reward)
            if sign:
                found.append(float(sign * (scores[one] - scores[other])))
    return found


def _scored_row(row: TrainSequence, pad: int | None) -> TrainSequence:
    """Return a row in which only the score of the answer is trained.

    The answer ends at its last trained token, without padding. One token is appended, because the value at an index is
    the model's output at the token before it.
    """
    tokens, trained = np.asarray(row.tokens), ~np.asarray(row.prompt_mask)
    tokens = tokens[: int(np.flatnonzero(trained)[-1]) + 1]
    kept = np.flatnonzero(tokens != pad)
    tokens = tokens[: kept[-1] + 1 if kept.size else 1]
    tokens = np.append(tokens, tokens[-1])
    mask = np.ones(len(tokens), bool)
    mask[-1] = False
    level = 0.0 if row.returns is None else float(np.asarray(row.returns)[-1])
    returns = np.full(len(tokens), level, np.float32)
    return TrainSequence(tokens=tokens, prompt_mask=mask, reward=float(row.reward), returns=returns)


def _untrained_row(row: TrainSequence) -> TrainSequence:
    return TrainSequence(
        tokens=np.asarray(row.tokens)[:2], prompt_mask=np.ones(2, bool), returns=np.zeros(2, np.float32)
    )
