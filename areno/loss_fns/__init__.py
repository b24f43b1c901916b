"""Losses over a DataPack (torch), and the numpy functions that compute advantages, rewards and weights for the losses.

A loss is `loss_fn(pack, logprobs_N, **settings) -> (loss, statistics)`, as `DataPack` describes. The public names are
imported only when they are first used, so that a configuration with the settings of a loss can be read without
importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areno.loss_fns.advantages import (
        choose_pairs,
        explained_variance,
        gae,
        group_advantages,
        normalize_tokens,
        overlong_penalty,
        shape_rewards,
        turn_advantages,
        turn_gae,
        turn_returns,
        turn_rewards,
    )
    from areno.loss_fns.correction import behave_weights, m2_keep
    from areno.loss_fns.data_pack import DataPack
    from areno.loss_fns.distillation import distillation_loss_fn
    from areno.loss_fns.dpo import dpo_loss_fn
    from areno.loss_fns.grpo import grpo_loss_fn
    from areno.loss_fns.gspo import gspo_loss_fn
    from areno.loss_fns.kl import kl_array
    from areno.loss_fns.kto import kto_loss_fn
    from areno.loss_fns.ppo import ppo_loss_fn, value_loss_fn
    from areno.loss_fns.process_reward import process_reward_loss_fn
    from areno.loss_fns.reward_model import reward_model_loss_fn
    from areno.loss_fns.sft import sft_loss_fn

__all__ = [
    "DataPack",
    "behave_weights",
    "choose_pairs",
    "distillation_loss_fn",
    "dpo_loss_fn",
    "explained_variance",
    "gae",
    "group_advantages",
    "grpo_loss_fn",
    "gspo_loss_fn",
    "kl_array",
    "kto_loss_fn",
    "m2_keep",
    "normalize_tokens",
    "overlong_penalty",
    "ppo_loss_fn",
    "process_reward_loss_fn",
    "reward_model_loss_fn",
    "sft_loss_fn",
    "shape_rewards",
    "turn_advantages",
    "turn_gae",
    "turn_returns",
    "turn_rewards",
    "value_loss_fn",
]

_MODULES = ("advantages", "correction", "data_pack", "distillation", "dpo", "grpo", "gspo", "kl", "kto")
_MODULES += ("ppo", "process_reward", "reward_model", "sft")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            there = vars(import_module(f"areno.loss_fns.{module}"))
            if name in there:
                return there[name]
    raise AttributeError(f"module 'areno.loss_fns' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
