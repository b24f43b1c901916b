"""The training loop of PPO: the loop of policy_only.py with a critic that estimates a value before every token."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np

from areno.config.policy_experiments import CriticExperimentConfig
from areno.engine.train.gradients import average_steps
from areno.loss_fns.advantages import explained_variance
from areno.run.progress import EVALUATED_REWARDS
from areno.run.run import fault_tolerant
from areno.tracking.console import log_stage
from areno.trainers.loop import RewardLoop
from areno.trainers.off_policy_correction import correct_rollout
from areno.trainers.policy_only import PolicyOnlyTrainer
from areno.trainers.rollout import log_rollout, log_samples_at_end, rollouts
from areno.trainers.rows import set_advantages, trained, without_truncated
from areno.trainers.update import make_training_rows, update_policy
from areno.types import TrainSequence

logger = logging.getLogger("areno")


class PPOTrainer(RewardLoop[CriticExperimentConfig]):
    """Trains a policy and a critic with PPO. Use it as a context manager, or call close()."""

    needs = CriticExperimentConfig
    headline = PolicyOnlyTrainer.headline
    also_saved = ("critic",)  # it can be loaded again as critic.path

    @fault_tolerant
    def fit(self) -> float:
        """Train for all steps of the run.

        Returns:
            The accuracy of the last evaluation, or its mean reward if it measures no accuracy. Without evaluation, the
            mean reward of the last 5 steps.
        """
        setup, run, config = self.setup, self.run, self.setup.config
        warmup, total = config.critic.warmup_steps, run.progress.total_steps
        if total <= warmup:
            text = "critic.warmup_steps=%d takes all %d steps of this run, so its checkpoint is the untrained policy; "
            text += "lower it, or train for more steps (total_train_steps, total_train_epochs, total_train_n_seqs)"
            logger.warning(text, warmup, total)
        for rollout in rollouts(setup):  # sample completions of each prompt, and score them
            rows = make_training_rows(setup, rollout)  # shape the rewards, score the reference
            for row, values in zip(rows, rollout.scores.scores_of_rows("values", rows), strict=True):
                row.values = values  # estimated before each token
            with run.clock.phase("advantage"):
                advantages, returns = self.advantages_of(rollout, rows)
                set_advantages(rows, rollout.rows_per_kept_sample, advantages)
                set_advantages(rows, rollout.rows_per_kept_sample, returns, "returns")
            log_rollout(setup, rollout, rows)
            masked = config.critic.mask_no_eos_with_zero
            stats = self.update_critic(
                without_truncated(rows, rollout.kept_samples, rollout.rows_per_kept_sample) if masked else rows
            )
            with log_samples_at_end(setup, rollout, rows):
                if run.step > warmup:
                    stats |= correct_rollout(setup, rollout, rows)  # weights for rows that another policy sampled
                    stats |= update_policy(setup, rows, rollout)
            run.end_step(stats)
        run.finish({"reward_mean": 5, EVALUATED_REWARDS: 1})
        return run.progress.result(EVALUATED_REWARDS, "reward_mean", 5)

    def update_critic(self, rows: list[TrainSequence]) -> dict[str, float]:
        """Take the optimizer steps of the critic on rows with `values` and `returns`, and return critic_* statistics.

        explained_variance is the share of the variance of the returns that the values before the update explain.
        """
        critic, run = self.setup.config.critic, self.run
        values, returns = (np.concatenate(trained(rows, name)) for name in ("values", "returns"))
        run.recorder.keep_update("critic", rows)
        with run.clock.phase("train_critic"):
            log_stage("train_start", role="critic")
            train = partial(
                self.setup.trainer.train_values,
                "critic",
                rows,
                cliprange_value=critic.eps_clip,
                value_loss_coef=critic.value_loss_coef,
                mb_spec=critic.mb_spec,
                n_minibatches=critic.ppo_n_minibatches,
            )
            stats = average_steps([train(seed=run.progress.seed + epoch) for epoch in range(critic.epochs)])
            log_stage("train_end", role="critic")
        numbers = {f"critic_{name}": value for name, value in stats.items()}
        return numbers | {"explained_variance": explained_variance(values, returns)}
