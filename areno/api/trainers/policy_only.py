"""The loop of GSPO, GRPO and their relatives: sample a group for each prompt, score it, compute advantages, update."""

from __future__ import annotations

from areno.api.loop import Stopwatch
from areno.api.policy_run import PolicyRun
from areno.api.rows import outcome_advantages, set_trained


class PolicyOnlyTrainer(PolicyRun):
    """Trains a policy from rewards, without a critic."""

    loop = "policy_only"

    def fit(self) -> float:
        """Run to the end; the accuracy of the last evaluation or, without one, the mean reward of the last 5 steps."""
        advantage_fn = self.advantage_fn or outcome_advantages
        for step, batch in self.steps():
            watch, seed = Stopwatch(), self.config.seed * 1_000_003 + step
            collected = self.collect(batch, seed, watch)
            rows, groups = self.rows(collected, watch)
            with watch.phase("advantage"):
                set_trained(rows, "advantages", advantage_fn(rows, groups, self.config.actor))
            self.log_rollout(collected, rows, watch)
            corrected = self.correct(rows, watch)
            stats = self.train(rows, seed, watch)
            self.end_step({**stats, **corrected}, watch)
        return self.finish()
