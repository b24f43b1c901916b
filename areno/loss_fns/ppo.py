"""PPO: Proximal Policy Optimization (arXiv 1707.06347 eq. 7) of tokens, with the dual clip (arXiv 1912.09729 eq. 5).

The critic's loss: squared error to the returns, with the value clip.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.pack import DataPack

ppo_loss_fn = partial(grpo_loss_fn, reduction="token_mean", c_clip=3.0)
"""Clipped surrogate of the token ratio exp(logprobs - old_logprobs), mean over the tokens of the step.

It is the loss of GRPO with another reduction and a dual clip; other settings can be given as to `grpo_loss_fn`. What
makes it PPO are its advantages, which come from a critic (`advantages.gae`). The critic has a loss of its own,
`value.value_loss_fn`.
"""


def value_loss_fn(
    pack: DataPack, values: Tensor, *, cliprange_value: float = 0.5, value_loss_coef: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """value_loss_coef * mean over tokens of max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), c = cliprange_value.

    The squared error is that of arXiv 1707.06347 eq. 9; the clip, which came with PPO's reference implementation, lets
    no value gain by moving more than c away from the one that the advantages were made with. There is no further half.

    values: (N,) of the trained critic, differentiable; entry t is the value before token t. Needs the old values in
    pack.values and the targets in pack.returns.
    Statistics: value_loss (without value_loss_coef), value_clip_frac (tokens whose clipped error was the larger one),
    value_mean; returns and value_error = R - v as observations: 1 - (value_error_std / returns_std)^2 is the explained
    variance over the step.
    """
    values_T = pack.trained(values)
    old_T, returns_T = pack.trained(pack.need("values")), pack.trained(pack.need("returns"))
    # Not old + clamp(v - old): rounding would move values that are not clipped, and count them.
    clipped_T = values_T.clamp(old_T - cliprange_value, old_T + cliprange_value)
    error_T, clipped_error_T = (values_T - returns_T).square(), (clipped_T - returns_T).square()
    value_loss = pack.token_mean(torch.maximum(error_T, clipped_error_T))
    stats = {
        "value_loss": value_loss,
        "value_clip_frac": pack.token_mean((clipped_error_T > error_T).to(values_T.dtype)),
        "value_mean": pack.token_mean(values_T),
        "returns": returns_T,
        "value_error": returns_T - values_T,
    }
    return value_loss_coef * value_loss, {name: value.detach() for name, value in stats.items()}
