"""The training loop of online DPO: sample, score, pair the best with the worst samples of each prompt, and train."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areno.config.experiments import LossFn
from areno.config.policy_experiments import PairedPolicyExperimentConfig
from areno.errors import ConfigError
from areno.loss_fns.advantages import Pair, choose_pairs
from areno.run.progress import EVALUATED_REWARDS
from areno.run.run import fault_tolerant
from areno.trainers.loop import RewardLoop
from areno.trainers.policy_only import PolicyOnlyTrainer
from areno.trainers.rollout import Rollout, log_rollout, log_samples_at_end, rollouts, skip_updates
from areno.trainers.rows import rows_per_sample
from areno.trainers.update import make_training_rows, rewards_by_source, update_actor
from areno.types import ScoredSample, TrainSequence

logger = logging.getLogger("areno")


def pair_signs(n_samples: int, pairs: Iterable[Pair]) -> np.ndarray:
    """Return (n_samples,) float64: 1 for each chosen sample, -1 for each rejected sample and 0 for all others."""
    found = np.zeros(n_samples)
    for chosen, rejected in pairs:
        found[chosen], found[rejected] = 1.0, -1.0
    return found


class OnlineDPOTrainer(RewardLoop[PairedPolicyExperimentConfig]):
    """Trains a policy on pairs of its own samples. Use it as a context manager, or call close().

    The arguments are those of `RewardLoop`, except:

    Args:
        loss_fn: Loss function (pack, logprobs) -> (loss, statistics) of pairs, as `areno.loss_fns.dpo_loss_fn`: rows 2i
            and 2i + 1 are the chosen and the rejected sample of a pair. None uses config.loss_fn().
        advantage_fn: Must be None, because pairs have no advantages.
    """

    needs = PairedPolicyExperimentConfig
    headline = (*PolicyOnlyTrainer.headline[:2], "train/accuracy")

    def __init__(
        self,
        config: PairedPolicyExperimentConfig,
        loss_fn: LossFn | None = None,
        run_dir: str | Path | None = None,
        *,
        advantage_fn: Any = None,
        **given: Any,
    ):
        if advantage_fn is not None:
            raise ConfigError("OnlineDPOTrainer takes no advantage_fn: rewards decide which samples are a pair")
        super().__init__(config, loss_fn, run_dir, **given)

    @fault_tolerant
    def fit(self) -> float:
        """Train for all steps of the run.

        Returns:
            The accuracy of the last evaluation, or its mean reward if it measures no accuracy. Without evaluation, the
            mean reward of the last 5 steps.
        """
        setup, run = self.setup, self.run
        for sampled in rollouts(setup):  # sample a group for each prompt, and score it
            rollout, pairs = self.pair(sampled)
            rows = make_training_rows(setup, rollout) if pairs else []  # score the reference
            for row, sign in zip(rows, pair_signs(len(rows), pairs), strict=True):
                row.advantages = np.where(np.asarray(row.prompt_mask, dtype=bool), 0.0, sign)  # for the log
            log_rollout(setup, rollout, rows)
            with log_samples_at_end(setup, rollout, rows):
                stats = self.train_pairs([rows[index] for pair in pairs for index in pair])
            run.end_step(stats)
        run.finish({"reward_mean": 5, EVALUATED_REWARDS: 1})
        return run.progress.result(EVALUATED_REWARDS, "reward_mean", 5)

    def pair(self, rollout: Rollout) -> tuple[Rollout, list[Pair]]:
        """Choose the pairs of a step. Return (rollout, pairs).

        The returned rollout keeps only samples that are in a pair, and its metrics include those of the pairs. A pair
        has indices into the `kept` samples of this rollout, each of which has one training row.
        """
        config, samples = self.setup.config, rollout.samples
        if n_apart := sum(n_rows > 1 for n_rows in rollout.rows_per_kept_sample):
            text = "%d samples of this step are in no pair: their agents' later turns do not begin with the tokens of "
            logger.warning(text + "the earlier turns, so each sample has several training rows", n_apart)
        able = [index for index in np.flatnonzero(rollout.keep).tolist() if self._is_comparable(samples[index])]
        rewards = rewards_by_source(config, [samples[index] for index in able])
        groups = [samples[index].group for index in able]
        found, tied = choose_pairs(rewards, groups, config.pairs_per_prompt)
        scalars: dict[str, float] = {"rollout/pairs": len(found), "rollout/tied_pairs": tied}
        if found:
            differences = [rewards[chosen] - rewards[rejected] for chosen, rejected in found]
            scalars["rollout/pair_reward_diff"] = float(np.mean(differences))
        else:
            problem = "no prompt of this step has samples with different rewards: there is no pair to train on"
            n_out = int(rollout.keep.sum()) - len(able)
            logger.warning(problem + " (%d samples are left out: cut off, empty, or in several training rows)", n_out)
        keep = np.zeros_like(rollout.keep)
        keep[[able[index] for pair in found for index in pair]] = True
        kept_index = (np.cumsum(keep) - 1)[able]  # of the samples among those that are kept
        pairs = [(int(kept_index[chosen]), int(kept_index[rejected])) for chosen, rejected in found]
        return replace(rollout, keep=keep, scalars={**rollout.scalars, **scalars}), pairs

    def _is_comparable(self, sample: ScoredSample) -> bool:
        """Return whether a sample can be in a pair: it has tokens, one row and, with mask_no_eos_with_zero, an end."""
        cut_off = sample.sequence.finish_reason == "length" and self.setup.config.actor.mask_no_eos_with_zero
        return not cut_off and sample.sequence.n_tokens > 0 and rows_per_sample([sample]) == [1]

    def train_pairs(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        """Take the optimizer steps of the actor on rows in the order chosen, rejected, chosen, rejected, ..."""
        if not rows:
            return skip_updates(self.setup)
        config, n_copies = self.setup.config, self.setup.trainer.engine.spec.layout.n_data_parallel_groups
        n_pairs = len(rows) // 2
        # Each copy of the model needs a pair in each update. Repeating all pairs does not change their mean.
        rows = [*rows] * -(-n_copies // n_pairs)
        n_updates = max(1, min(config.actor.ppo_n_minibatches, n_pairs // n_copies))
        how = {"rows_per_unit": 2, "old_logprobs": config.actor.old_logprobs}
        return update_actor(self.setup, rows, n_minibatches=n_updates, sampling=config.gconfig, **how)
