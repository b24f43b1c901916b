"""The training loop of process reward models, which learn to score each step of a solution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areno.config.experiments import ProcessRewardExperimentConfig
from areno.data.loader import BatchLoader
from areno.trainers.loop import AnswerLoop
from areno.trainers.reward_model import calibration_error
from areno.trainers.rows import token_rows, trained, trained_mask
from areno.trainers.update import measure_loss, update_actor
from areno.types import AnswersItem, TrainSequence


class ProcessRewardTrainer(AnswerLoop[ProcessRewardExperimentConfig]):
    """Trains a process reward model on solutions whose steps have labels. Use it as a context manager, or call close().

    The reward of an answer in reinforcement learning is made from the scores of its steps, see reward.step_score.
    """

    needs, kind = ProcessRewardExperimentConfig, "prm"
    headline = ("train/loss", "train/accuracy", "train/first_error_accuracy")

    def train_step(self, items: Sequence[AnswersItem]) -> dict[str, float]:
        stats = update_actor(self.setup, _scored_rows(items))
        found = {name: stats.pop(f"first_error_{name}", None) for name in ("mean", "std", "max")}
        # A batch in which every step is right has no first error.
        return stats if found["mean"] is None else stats | {"first_error_accuracy": found["mean"]}

    def measure(self, name: str, loader: BatchLoader[AnswersItem]) -> dict[str, float]:
        """Return loss, accuracy, margin, confidence and first_error_accuracy, see process_reward_loss_fn.

        rewards_mean is the mean score of a step, and calibration_error is computed over all steps, see
        `reward_model.calibration_error`.
        """
        rows = _scored_rows([item for batch in loader.batches() for item in batch.items])
        values = self.setup.trainer.score_values("actor", token_rows(rows))
        measured = measure_loss(self.setup.loss_fn, rows, values)
        scored = [
            (labels, np.asarray(of_row, np.float64)[trained_mask(row)])
            for row, labels, of_row in zip(rows, trained(rows, "returns"), values, strict=True)
        ]
        logits = np.concatenate([values for _, values in scored])
        sides = np.where(np.concatenate([labels for labels, _ in scored]) < 0.5, -logits, logits)
        return {
            **{name: measured[name] for name in ("loss", "accuracy", "margin", "confidence")},
            "first_error_accuracy": first_error_accuracy(scored),
            "calibration_error": calibration_error(sides.tolist()),
            "rewards_mean": float(np.mean(1 / (1 + np.exp(-logits)))),
        }


def first_error_accuracy(solutions: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the share of solutions with a wrong step in which the scores find the first wrong step.

    They find the step if it is the first with log-odds below 0. `solutions` has, for each solution, (labels, log-odds
    of being right) of its steps. A label below 0.5 is wrong.
    """
    found = [
        int(np.argmin(labels >= 0.5)) == (int(np.argmax(logits < 0)) if (logits < 0).any() else -1)
        for labels, logits in solutions
        if (labels < 0.5).any()
    ]
    return sum(found) / max(1, len(found))


def _scored_rows(items: Sequence[AnswersItem]) -> list[TrainSequence]:
    """Return training rows that train the model's output at each labelled token.

    In a training row, the value at index t is the model's output at token t - 1. So masks and labels are shifted by one
    index, and a token is appended to each row.
    """
    rows = []
    for item in items:
        [row] = item.rows
        tokens, mask = np.asarray(row.tokens), np.asarray(row.prompt_mask)
        rows.append(
            TrainSequence(
                tokens=np.append(tokens, tokens[-1]),
                prompt_mask=np.append([True], mask),
                returns=np.append(np.float32(0), np.asarray(row.returns)),
            )
        )
    return rows
