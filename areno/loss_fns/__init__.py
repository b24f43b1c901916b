"""The maths: losses over a DataPack (torch), and what is made of rewards before them (numpy).

A loss is `loss_fn(pack, logprobs_N, **settings) -> (0-dim share of the step's loss, statistics)`; statistics are 0-dim
shares that are summed over the step, or 1-dim observations.
"""

from areno.loss_fns.advantages import (
    explained_variance,
    gae,
    group_advantages,
    normalize_tokens,
    overlong_penalty,
    shape_rewards,
)
from areno.loss_fns.correction import behave_weights, m2_keep
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.kl import kl_array
from areno.loss_fns.pack import DataPack
from areno.loss_fns.ppo import ppo_loss_fn, value_loss_fn
from areno.loss_fns.sft import sft_loss_fn

__all__ = [
    "DataPack",
    "behave_weights",
    "dpo_loss_fn",
    "explained_variance",
    "gae",
    "group_advantages",
    "grpo_loss_fn",
    "gspo_loss_fn",
    "kl_array",
    "m2_keep",
    "normalize_tokens",
    "overlong_penalty",
    "ppo_loss_fn",
    "sft_loss_fn",
    "shape_rewards",
    "value_loss_fn",
]
