"""The maths: losses over a DataPack (torch), and what is made of rewards before them (numpy). Imported when first used.

A loss is `loss_fn(pack, logprobs_N, **settings) -> (0-dim share of the step's loss, statistics)`; statistics are 0-dim
shares that are summed over the step, or 1-dim observations.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from areno.loss_fns.advantages import explained_variance, gae, group_advantages, normalize_tokens
    from areno.loss_fns.correction import behave_weights, m2_keep
    from areno.loss_fns.dpo import dpo_loss_fn
    from areno.loss_fns.grpo import grpo_loss_fn
    from areno.loss_fns.gspo import gspo_loss_fn
    from areno.loss_fns.kl import kl_array
    from areno.loss_fns.pack import DataPack
    from areno.loss_fns.ppo import ppo_loss_fn
    from areno.loss_fns.sft import sft_loss_fn
    from areno.loss_fns.shaping import overlong_penalty, shape_rewards
    from areno.loss_fns.value import value_loss_fn

_NAMES = {
    "advantages": ("explained_variance", "gae", "group_advantages", "normalize_tokens"),
    "correction": ("behave_weights", "m2_keep"),
    "dpo": ("dpo_loss_fn",),
    "grpo": ("grpo_loss_fn",),
    "gspo": ("gspo_loss_fn",),
    "kl": ("kl_array",),
    "pack": ("DataPack",),
    "ppo": ("ppo_loss_fn",),
    "sft": ("sft_loss_fn",),
    "shaping": ("overlong_penalty", "shape_rewards"),
    "value": ("value_loss_fn",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'areno.loss_fns' has no attribute {name!r}")
    value = getattr(import_module(f"areno.loss_fns.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
