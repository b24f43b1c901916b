"""The training loop of GSPO, GRPO and related algorithms: sample, score, compute advantages, log, train."""

from __future__ import annotations

from areno.config.policy_experiments import PolicyExperimentConfig
from areno.run.progress import EVALUATED_REWARDS
from areno.run.run import fault_tolerant
from areno.trainers.loop import RewardLoop
from areno.trainers.off_policy_correction import correct_rollout
from areno.trainers.rollout import log_rollout, log_samples_at_end, rollouts
from areno.trainers.rows import set_advantages
from areno.trainers.update import make_training_rows, update_policy


class PolicyOnlyTrainer(RewardLoop[PolicyExperimentConfig]):
    """Trains a policy from rewards, without a critic. Use it as a context manager, or call close()."""

    needs = PolicyExperimentConfig
    headline = ("rollout/rewards_mean", "train/response_len", "train/explained_variance")

    @fault_tolerant
    def fit(self) -> float:
        """Train for all steps of the run.

        Returns:
            The accuracy of the last evaluation, or its mean reward if it measures no accuracy. Without evaluation, the
            mean reward of the last 5 steps.
        """
        setup, run = self.setup, self.run
        for rollout in rollouts(setup):  # sample a group for each prompt, and score it
            rows = make_training_rows(setup, rollout)  # shape the rewards, score the reference
            with run.clock.phase("advantage"):
                set_advantages(rows, rollout.rows_per_kept_sample, self.advantages_of(rollout, rows))
            log_rollout(setup, rollout, rows)
            stats = correct_rollout(setup, rollout, rows)  # weights for rows that another policy sampled
            with log_samples_at_end(setup, rollout, rows):
                stats |= update_policy(setup, rows, rollout)
            run.end_step(stats)
        run.finish({"reward_mean": 5, EVALUATED_REWARDS: 1})
        return run.progress.result(EVALUATED_REWARDS, "reward_mean", 5)
