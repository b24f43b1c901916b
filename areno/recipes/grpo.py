"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300), and DAPO's and Dr.GRPO's changes to it as settings.

    python -m areno.recipes.grpo --config-name=gsm8k actor.path=<model folder>

Each step samples `gconfig.n_samples` completions for each prompt, scores them, and normalises rewards within the group.
Every token has its own ratio to the sampling policy, clipped at 1 ± actor.eps_clip. actor.reduction says how token
losses become one number.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from areno.config.experiments import GRPOConfig

CONFIG = GRPOConfig
DEFAULT = "quickstart"


def main(config: GRPOConfig, run_dir: Path) -> float:
    """Run one experiment; the accuracy on valid_dataset or, without one, the mean reward of the last 5 steps."""
    from areno.api.trainers.policy_only import PolicyOnlyTrainer
    from areno.loss_fns.grpo import grpo_loss_fn

    actor = config.actor
    loss_fn = partial(
        grpo_loss_fn,
        clip_eps=actor.eps_clip,
        clip_eps_higher=actor.eps_clip_higher,
        c_clip=actor.c_clip,
        reduction=actor.reduction,
        norm_length=config.gconfig.max_new_tokens,
        kl_coef=actor.kl_ctl,
        kl_estimator=actor.kl_estimator,
    )
    with PolicyOnlyTrainer(config, loss_fn, run_dir) as trainer:
        return trainer.fit()


if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.grpo")
