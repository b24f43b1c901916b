"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300), and its successors' changes to it as settings.

    python -m areno.recipes.grpo --config-name=gsm8k actor.path=<model folder>

Each step samples `gconfig.n_samples` completions for each prompt, scores them, and normalises rewards within the group.
Every token has its own ratio to the sampling policy, clipped at 1 ± actor.eps_clip. actor.reduction says how token
losses become one number. docs/algorithms.md names the variants and their settings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from areno.api.algorithms import Algorithm
from areno.config.experiments import GRPOConfig


def loss_fn(config: GRPOConfig) -> Callable[..., Any]:
    """The loss function that the settings describe."""
    from areno.loss_fns import grpo_loss_fn

    return partial(grpo_loss_fn, **config.actor.loss_settings(config.gconfig.max_new_tokens))


ALGORITHM = Algorithm(name="grpo", config=GRPOConfig, loop="policy_only", loss_fn=loss_fn)

if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.grpo")
