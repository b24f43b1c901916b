"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

    python -m areno.recipes.gspo --config-name=gsm8k actor.path=<model folder>

Each step samples `gconfig.n_samples` completions for each prompt, scores them, and normalises rewards within the group.
The ratio to the sampling policy is that of the whole sequence, s = exp(mean log-ratio of its tokens), clipped at
1 ± actor.eps_clip (eq. 5-7). Beside the paper, and off by default: an upper clip of its own (eps_clip_higher), a dual
clip (c_clip), and a KL to a reference (kl_ctl).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from areno.api.algorithms import Algorithm
from areno.config.experiments import GSPOConfig


def loss_fn(config: GSPOConfig) -> Callable[..., Any]:
    """The loss function that the settings describe."""
    from areno.loss_fns import gspo_loss_fn

    return partial(gspo_loss_fn, **config.actor.loss_settings(config.gconfig.max_new_tokens))


ALGORITHM = Algorithm(name="gspo", config=GSPOConfig, loop="policy_only", loss_fn=loss_fn)

if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.gspo")
