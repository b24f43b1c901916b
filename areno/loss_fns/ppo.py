"""The losses of PPO: of the policy (arXiv 1707.06347 eq. 7, dual clip arXiv 1912.09729 eq. 5) and of the critic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.grpo import grpo_loss_fn

ppo_loss_fn = partial(grpo_loss_fn, reduction="token_mean", c_clip=3.0)
"""The clipped surrogate of the token ratio exp(logprobs - old_logprobs), averaged over the tokens of the step.

The loss is that of GRPO with another reduction and a dual clip, and takes the same settings as `grpo_loss_fn`. PPO
differs by its advantages, which come from a critic (`advantages.gae`). The loss of the critic is `value_loss_fn`.
"""


def value_loss_fn(
    pack: DataPack, values: Tensor, *, cliprange_value: float = 0.5, value_loss_coef: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of the critic: the squared error to the returns, with a value clip.

    The loss is value_loss_coef times the mean over tokens of max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2),
    with c = cliprange_value. The squared error is that of arXiv 1707.06347 eq. 9, without a further factor 1/2. The
    clip comes from PPO's reference implementation: the loss does not decrease when a value moves further than c away
    from the old value.

    The statistics are value_loss (without value_loss_coef), value_clip_frac (the share of tokens whose clipped error is
    larger), value_mean, and the observations returns and value_error = R - v. The explained variance of the step is 1 -
    (value_error_std / returns_std)^2.

    Args:
        pack: The micro-batch, with `values` (from before the update) and `returns`.
        values: (N,) values predicted by the critic in training, differentiable. Entry t is the value before token t.
    """
    values_T = pack.trained(values)
    old_T, returns_T = pack.trained(pack.need("values")), pack.trained(pack.need("returns"))
    # Not old + clamp(v - old): rounding would change values that are not clipped, and they would count as clipped.
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
