"""The training loop of distillation: the teacher judges each token of answers by the student or of the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areno.config.experiments import LossFn
from areno.config.policy_experiments import DistillExperimentConfig
from areno.data.encode import encode_rows
from areno.data.row_rendering import render_sft
from areno.errors import ConfigError
from areno.run.progress import EVALUATED_REWARDS
from areno.run.run import fault_tolerant
from areno.trainers.loop import RewardLoop
from areno.trainers.rollout import collect_rollout, log_rollout, log_samples_at_end, skip_step
from areno.trainers.update import make_training_rows, set_teachers, update_policy
from areno.types import PromptItem, TrainSequence


class DistillTrainer(RewardLoop[DistillExperimentConfig]):
    """Trains a student to follow a teacher. Use it as a context manager, or call close().

    The arguments are those of `RewardLoop`, except:

    Args:
        loss_fn: Loss function that replaces the loss of distillation, see areno.loss_fns. teacher.loss_type chooses its
            input: `pack.teacher_logprobs` with sampled_reverse_kl, otherwise `pack.divergence`.
        advantage_fn: Not used.
    """

    needs = DistillExperimentConfig
    headline = ("train/distill_loss", "train/response_len", "rollout/rewards_mean")

    def __init__(
        self,
        config: DistillExperimentConfig,
        loss_fn: LossFn | None = None,
        run_dir: str | Path | None = None,
        *,
        advantage_fn: Any = None,
        **given: Any,
    ):
        if given.get("reward_fn") is None and (problems := list(config.check_evaluation_rewards())):
            raise ConfigError(problems)
        super().__init__(config, loss_fn, run_dir, **given)

    @fault_tolerant
    def fit(self) -> float:
        """Train for all steps of the run.

        Returns:
            The accuracy of the last evaluation. Without evaluation, the loss of the last step.
        """
        setup, run = self.setup, self.run
        for batch in run.steps():
            n_own = self.n_answered(len(batch.items))
            rows = self.given_rows(batch.items[n_own:])
            if n_own:
                rollout = collect_rollout(setup, replace(batch, items=batch.items[:n_own]))  # the student answers
                if not rollout.kept_samples and not rows:
                    skip_step(setup, rollout)
                    continue
                own = make_training_rows(setup, rollout)  # score the teacher, if the loss is the sampled form
                for row in own:
                    row.advantages = _teacher_log_ratio(row)
                log_rollout(setup, rollout, own)
                with log_samples_at_end(setup, rollout, own):
                    trained = [*map(_without_rollout_fields, own), *rows] if rows else own
                    stats = update_policy(setup, trained)
                    for row, copied in zip(own, trained, strict=False):
                        row.old_logprobs = copied.old_logprobs
            else:
                run.log_skipped(batch)
                stats = update_policy(setup, rows)
            name = "distill_loss" if "distill_loss" in stats else "loss"  # a user's loss function need not return it
            run.progress.append_to_history(**{name: stats[name]})
            run.end_step(stats)
        run.finish({"distill_loss": 1, "loss": 1, EVALUATED_REWARDS: 1})
        return run.progress.result(EVALUATED_REWARDS, "loss" if "loss" in run.progress.history else "distill_loss")

    def n_answered(self, n_rows: int) -> int:
        """Return how many of the current batch's `n_rows` prompts the student answers. The dataset answers the others.

        Over many steps, the share of these prompts is on_policy_share. The number depends only on the step, so a
        resumed run gets the same numbers.
        """
        share, step = self.setup.config.on_policy_share, self.run.step
        size = self.setup.config.train_dataset.batch_size
        before, after = (int(np.floor(share * size * n + 1e-9)) for n in (step - 1, step))
        return min(n_rows, after - before) if share < 1 else n_rows

    def given_rows(self, items: Sequence[PromptItem]) -> list[TrainSequence]:
        """Make training rows of the dataset's responses.

        Each row is truncated, so that it fits the context after the student's prompt and after the teacher's prompt.
        """
        setup, rows, of_rows = self.setup, [], list[PromptItem]()
        thinking, changed = setup.config.rollout.enable_thinking, setup.config.train_dataset.changed_turns
        if setup.config.teacher.prompt_key is not None and changed == "split":
            changed = "as_rendered"  # the teacher's prompt stands before the first turn, so all turns must follow it
        found = encode_rows(
            setup.tokenizer,
            [item.record for item in items],
            [item.index for item in items],
            lambda row, index: render_sft(setup.tokenizer, row, index, thinking, changed),
        )
        for item, answers in zip(items, found, strict=True):
            if isinstance(answers, Exception):
                raise answers
            most = setup.trainer.info.context_len - max(0, len(item.teacher_tokens or ()) - len(item.tokens))
            for row in answers.rows:
                rows.append(replace(row, tokens=row.tokens[:most], prompt_mask=row.prompt_mask[:most]))  # type: ignore[index]
                of_rows.append(item)
        set_teachers(setup, of_rows, rows)
        return rows


def _teacher_log_ratio(row: TrainSequence) -> np.ndarray:
    """Return log(teacher / student) of each trained token, for logs only. Without teacher_logprobs, return zeros."""
    if row.teacher_logprobs is None:
        return np.zeros(len(row.tokens))  # type: ignore[arg-type]
    apart = np.asarray(row.teacher_logprobs) - np.asarray(row.logprobs)
    return np.where(np.asarray(row.prompt_mask), 0.0, apart)


def _without_rollout_fields(row: TrainSequence) -> TrainSequence:
    """Return a copy of a row without `logprobs` and `advantages`, which rows of the dataset's responses lack."""
    return replace(row, logprobs=None, advantages=None)
