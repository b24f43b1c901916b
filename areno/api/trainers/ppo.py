"""The loop of PPO: sample, score, value every token with the critic, GAE, update critic and actor."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from areno.api.console import log_stage
from areno.api.loop import Stopwatch
from areno.api.policy_run import PolicyRun
from areno.api.rows import critic_advantages, set_trained, trained
from areno.config.experiments import PPOConfig
from areno.engine.types import TrainSequence
from areno.loss_fns.advantages import explained_variance

logger = logging.getLogger("areno")


class PPOTrainer(PolicyRun):
    """Trains a policy and its critic."""

    loop = "ppo"
    config: PPOConfig

    def fit(self) -> float:
        """Run to the end; the accuracy of the last evaluation or, without one, the mean reward of the last 5 steps."""
        advantage_fn = self.advantage_fn or critic_advantages
        warmup, total = self.config.critic.warmup_steps, self.config.total_train_steps
        if total is not None and total <= warmup:
            logger.warning("critic.warmup_steps=%d takes all %d steps: the policy is not trained", warmup, total)
        for step, batch in self.steps():
            watch, seed = Stopwatch(), self.config.seed * 1_000_003 + step
            collected = self.collect(batch, seed, watch)
            rows, groups = self.rows(collected, watch)
            with watch.phase("values"):
                self._value(rows)
            with watch.phase("advantage"):
                advantages, returns = advantage_fn(rows, groups, self.config.actor)
                set_trained(rows, "advantages", advantages)
                set_trained(rows, "returns", returns)
            self.log_rollout(collected, rows, watch)
            stats = self._train_critic(rows, seed, watch)
            if step > warmup:
                corrected = self.correct(rows, watch)
                stats |= self.train(rows, seed, watch) | corrected
            self.end_step(stats, watch)
        return self.finish()

    def _value(self, rows: list[TrainSequence]) -> None:
        assert self.trainer is not None
        for row, values in zip(
            rows, self.trainer.score_values("critic", [row.tokens or [] for row in rows]), strict=True
        ):
            row.values = values

    def _train_critic(self, rows: list[TrainSequence], seed: int, watch: Stopwatch) -> dict[str, float]:
        """Optimizer steps of the critic; its numbers as critic_*, and how much of the returns it had explained."""
        assert self.trainer is not None
        critic = self.config.critic
        values, returns = (np.concatenate(trained(rows, name)) for name in ("values", "returns"))
        with watch.phase("train_critic"):
            log_stage("train_start", role="critic")
            stats = self.trainer.train_values(
                "critic",
                rows,
                cliprange_value=critic.eps_clip,
                value_loss_coef=critic.value_loss_coef,
                mb_spec=critic.mb_spec,
                n_minibatches=critic.ppo_n_minibatches,
                seed=seed,
            )
            log_stage("train_end", role="critic")
        numbers = {f"critic_{name}": value for name, value in stats.items()}
        return numbers | {"explained_variance": explained_variance(values, returns)}

    def write_checkpoint(self, folder: Path) -> None:
        """The actor, and in it the critic as a folder of its own, which can be loaded again as critic.path."""
        assert self.trainer is not None
        super().write_checkpoint(folder)
        self.trainer.write_checkpoint(folder / "critic", role="critic")
