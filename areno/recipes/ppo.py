"""PPO: Proximal Policy Optimization (arXiv 1707.06347) with a critic.

    python -m areno.recipes.ppo --config-name=gsm8k actor.path=<model folder>

Each step samples completions, scores them by reward.fn, by the reward model reward.path, or both, and values every
response token with the critic. Advantages are generalised advantage estimates (arXiv 1506.02438), whitened over the
batch. The critic, a transformer body with one output for each token, is trained on the same rows; it starts from the
actor's body, or from critic.path, and for critic.warmup_steps it is trained alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from areno.api.algorithms import Algorithm
from areno.config.experiments import PPOConfig


def loss_fn(config: PPOConfig) -> Callable[..., Any]:
    """The loss function that the settings describe; the critic has its own."""
    from areno.loss_fns import ppo_loss_fn

    return partial(ppo_loss_fn, **config.actor.loss_settings(config.gconfig.max_new_tokens))


ALGORITHM = Algorithm(
    name="ppo", config=PPOConfig, loop="ppo", loss_fn=loss_fn, roles=("critic",), default="quickstart_ppo"
)

if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.ppo")
