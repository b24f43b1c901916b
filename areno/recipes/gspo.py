"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

    python -m areno.recipes.gspo --config-name=gsm8k actor.path=<model folder>

Each step samples `gconfig.n_samples` completions for each prompt, scores them, and normalises rewards within the group.
The ratio to the sampling policy is that of the whole sequence, s = exp(mean log-ratio of its tokens), clipped at
1 ± actor.eps_clip (eq. 5-7). Beside the paper, and off by default: an upper clip of its own (eps_clip_higher), a dual
clip (c_clip), and a k3 KL to a reference (kl_ctl).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from areno.config.experiments import GSPOConfig

CONFIG = GSPOConfig
DEFAULT = "quickstart"


def main(config: GSPOConfig, run_dir: Path) -> float:
    """Run one experiment; the accuracy on valid_dataset or, without one, the mean reward of the last 5 steps."""
    from areno.api.trainers.policy_only import PolicyOnlyTrainer
    from areno.loss_fns.gspo import gspo_loss_fn

    actor = config.actor
    loss_fn = partial(
        gspo_loss_fn,
        clip_eps=actor.eps_clip,
        clip_eps_higher=actor.eps_clip_higher,
        c_clip=actor.c_clip,
        kl_coef=actor.kl_ctl,
        kl_estimator=actor.kl_estimator,
    )
    with PolicyOnlyTrainer(config, loss_fn, run_dir) as trainer:
        return trainer.fit()


if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.gspo")
