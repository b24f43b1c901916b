"""The loop of preference training: score every pair under the reference once, then train on the pairs."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno.api.algorithms import check_config
from areno.api.batches import dpo_loader
from areno.api.build import model_folder
from areno.api.console import Progress, log_stage
from areno.api.loop import Stopwatch
from areno.api.row_run import RowRun
from areno.api.types import Batch, PairItem
from areno.config.experiments import DPOConfig
from areno.engine.spec import RoleSpec
from areno.engine.types import TrainSequence
from areno.loss_fns.dpo import dpo_loss_fn, preference_loss, preferred

logger = logging.getLogger("areno")

# Row number -> log-probabilities of all tokens of its two rows, chosen and rejected, float32.
Scores = dict[int, tuple[np.ndarray, np.ndarray]]


class DPOTrainer(RowRun[PairItem]):
    """Trains a model on pairs of answers, of which one was preferred."""

    config: DPOConfig
    kind = "dpo"
    open_loader = staticmethod(dpo_loader)

    def __init__(self, config: DPOConfig, run_dir: str | Path | None = None, **rows: Any):
        check_config(config, self.kind)
        self.ref_path: str | None = None  # the actor scores itself
        if config.ref.path not in (None, config.actor.path):
            self.ref_path = model_folder(config.ref.path or "", "ref.path")
        self.ref_scores: Scores = {}
        self.valid_ref_scores: Scores = {}
        self._has_reference = False
        super().__init__(config, run_dir, **rows)

    def fit(self) -> float:
        """Run to the end; the accuracy of the last evaluation or, without one, the mean of the last 5 steps'."""
        actor = self.config.actor
        loss_fn = partial(
            dpo_loss_fn, beta=actor.beta, label_smoothing=actor.label_smoothing, loss_type=actor.loss_type
        )
        self.score_reference()
        for _, batch in self.steps():
            watch = Stopwatch()
            rows = [row for item in batch.items for row in _with_scores(item, self.ref_scores[item.index])]
            stats = self.train(rows, loss_fn, watch, granularity=2)
            self.end_step(batch, stats, watch, ("loss", "accuracy", "margin"))
        self.finish("accuracy", "margin")
        if self.evaluated:
            return self.evaluated[-1]["accuracy"]
        return float(np.mean([stats["accuracy"] for stats in self.trained[-5:]]))

    def evaluate(self) -> dict[str, float]:
        """See `measure`; what it needs of the reference is scored before."""
        self.score_reference()
        return super().evaluate()

    def score_reference(self) -> None:
        """Reference log-probabilities of every pair that the run will use. To be called before the first update.

        Without a path of its own, the reference is the actor as it is now, so no second model is ever loaded.
        """
        if self._has_reference:
            return
        role = "actor" if self.ref_path is None else "ref"
        if self.ref_path is not None:
            self.trainer.ensure_roles({role: RoleSpec(path=self.ref_path, head="lm", key="ref.path")})
        started = time.monotonic()
        log_stage("score_start", role="ref")
        self._score(role, self._pairs_to_train(), len(self.loader.rows), self.ref_scores)
        if (valid := self.valid_loader) is not None:
            self._score(role, (batch.items for batch in valid.batches()), len(valid.rows), self.valid_ref_scores)
        log_stage("score_end", role="ref")
        n_pairs = len(self.ref_scores) + len(self.valid_ref_scores)
        logger.info("reference log-probabilities: %d pairs in %.1f s", n_pairs, time.monotonic() - started)
        if self.ref_path is not None:
            self.trainer.release_role(role)
        self._has_reference = True

    def _pairs_to_train(self) -> Iterator[list[PairItem]]:
        """The pairs that this run trains on, each once, by the batch. The loader stands afterwards where it stood."""
        config, loader = self.config, self.loader
        limits = [config.total_train_steps]
        if config.total_train_n_seqs is not None:
            limits.append(-(-config.total_train_n_seqs // config.train_dataset.batch_size))
        n_batches = min((limit for limit in limits if limit is not None), default=None)
        before, seen = loader.state_dict(), set()
        for batch in itertools.islice(loader.batches(), n_batches):
            seen.update(item.index for item in batch.items)
            yield batch.items
        goes_on = loader.epoch != before["epoch"] and config.total_train_epochs > 1
        loader.load_state_dict(before)
        if goes_on:  # another epoch, in another order, leaves out other rows at its end
            left = (item for item in loader.items() if item.index not in seen)
            while items := list(itertools.islice(left, config.train_dataset.batch_size)):
                yield items

    def _score(self, role: str, batches: Iterable[Sequence[PairItem]], n_rows: int, out: Scores) -> None:
        with Progress("reference", n_rows, unit="pairs") as progress:
            n_tokens = 0
            for items in batches:
                for item, chosen, rejected in self._logprobs(role, items):
                    out[item.index] = np.asarray(chosen, np.float32), np.asarray(rejected, np.float32)
                    n_tokens += len(chosen) + len(rejected)
                progress.update(len(out), n_tokens)

    def _logprobs(self, role: str, items: Sequence[PairItem]) -> Iterator[tuple[PairItem, list[float], list[float]]]:
        """Each pair with the log-probabilities of all tokens of its chosen and its rejected row."""
        rows = [row.tokens or [] for item in items for row in (item.chosen, item.rejected)]
        scored = self.trainer.score_logprobs(role, rows, 1.0)
        return zip(items, scored[0::2], scored[1::2], strict=True)

    def measure(self, batches: Iterator[Batch[PairItem]]) -> dict[str, float]:
        """loss, accuracy and margin (see dpo_loss_fn) over all pairs.

        Also ranking_accuracy: the share of pairs whose chosen answer is the more likely one by itself, without a look
        at the reference.
        """
        actor = self.config.actor
        margins, differences = [], []
        for batch in batches:
            for item, *logprobs in self._logprobs("actor", batch.items):
                pair = list(zip((item.chosen, item.rejected), logprobs, self.valid_ref_scores[item.index], strict=True))
                chosen, rejected = (_score_of(row, lp, ref, mean=actor.loss_type == "ipo") for row, lp, ref in pair)
                margins.append(chosen - rejected)
                chosen, rejected = (_score_of(row, lp, np.zeros(len(lp))) for row, lp, _ in pair)
                differences.append(chosen - rejected)
        margins_P = torch.tensor(margins, dtype=torch.float64)
        losses_P = preference_loss(margins_P, actor.beta, actor.label_smoothing, actor.loss_type)
        return {
            "loss": losses_P.mean().item(),
            "accuracy": preferred(margins_P).mean().item(),
            "margin": actor.beta * margins_P.mean().item(),
            "ranking_accuracy": preferred(torch.tensor(differences)).mean().item(),
        }


def _with_scores(item: PairItem, scores: tuple[np.ndarray, np.ndarray]) -> list[TrainSequence]:
    """The two rows to train on, chosen and rejected."""
    pair = zip((item.chosen, item.rejected), scores, strict=True)
    return [replace(row, ref_logprobs=of_row.tolist()) for row, of_row in pair]


def _score_of(row: TrainSequence, logprobs: list[float], ref_logprobs: np.ndarray, mean: bool = False) -> float:
    """h of a row (see areno.loss_fns.dpo), or h / L."""
    trained = ~np.asarray(row.prompt_mask)
    trained[0] = False  # nothing predicts it
    log_ratio = (np.asarray(logprobs, np.float64) - ref_logprobs)[trained]
    return float(log_ratio.mean() if mean else log_ratio.sum())
