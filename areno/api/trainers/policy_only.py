"""The loop of GSPO, GRPO and their relatives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from areno.api.attended import attended
from areno.api.rollout.by_sample import joined, set_advantages
from areno.api.rollout.collect import collect, evaluate_policy
from areno.api.rollout.log import log_rollout, log_samples
from areno.api.trainers.rows import AdvantageFn
from areno.api.trainers.setup import RewardFns, Setup
from areno.api.trainers.update import correct, rows_of, update_policy
from areno.config.experiments import LossFn, PolicyExperimentConfig

HEADLINE = ("rollout/rewards_mean", "train/response_len", "train/explained_variance")


class PolicyOnlyTrainer(AbstractContextManager["PolicyOnlyTrainer"]):
    """Trains a policy from rewards, without a critic.

    loss_fn: (pack, logprobs) -> (loss, stats), see areno.loss_fns; None is the one that config describes.
    run_dir: where logs, rollouts and checkpoints go; None is a new folder under cluster.fileroot.
    advantage_fn: see AdvantageFn; None is the one that config describes.
    train_dataset, valid_dataset: rows of a script, in place of the configured paths. reward_fn: a function or a
    list of them, in place of reward.fn.

    Construction checks what can be checked, starts the reward processes and loads the models. Use as a context manager,
    or call close().
    """

    def __init__(
        self,
        config: PolicyExperimentConfig,
        loss_fn: LossFn | None = None,
        run_dir: str | Path | None = None,
        *,
        advantage_fn: AdvantageFn | None = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        reward_fn: RewardFns | None = None,
    ):
        self.setup = Setup(
            config, "PolicyOnlyTrainer", PolicyExperimentConfig, "prompt", HEADLINE, evaluate_policy,
            loss_fn=loss_fn, run_dir=run_dir, train_dataset=train_dataset, valid_dataset=valid_dataset,
            reward_fn=reward_fn,
        )  # fmt: skip
        self.run = self.setup.run
        self.advantages = config.advantages
        if advantage_fn is not None:
            self.advantages = lambda rows, groups: advantage_fn(rows, groups, config.actor)

    @attended
    def fit(self) -> float:
        """Run to the end; the accuracy of the last evaluation or, without one, the mean reward of the last 5 steps."""
        setup, run = self.setup, self.run
        for batch in run.steps():
            rollout = collect(setup, batch)  # sample a group for each prompt, and score it
            rows = rows_of(setup, rollout)  # shape the rewards, score the reference
            with run.clock.phase("advantage"):
                advantages = self.advantages(joined(rows, rollout.sizes), rollout.groups)
                set_advantages(rows, rollout.sizes, advantages)
            log_rollout(setup, rollout, rows)
            stats = correct(setup, rows)  # what the policy thinks of the rows before the update
            log_samples(setup, rollout, rows)
            stats = update_policy(setup, rows) | stats
            run.end_step(stats)
        run.finish({"reward_mean": 5, "eval_accuracy": 1})
        return run.result("eval_accuracy", "reward_mean", 5)

    def evaluate(self) -> dict[str, float]:
        """Measure the whole of valid_dataset; records and returns eval/* scalars by name."""
        return self.run.evaluate()

    def close(self) -> None:
        """End the processes of the run, and close its logs."""
        self.setup.close()

    def __exit__(self, *exc: object) -> None:
        self.close()
