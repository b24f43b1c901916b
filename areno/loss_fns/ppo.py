"""PPO: the losses of the policy (arXiv 1707.06347 eq. 7, dual clip arXiv 1912.09729 eq. 5) and of the critic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.pack import DataPack

ppo_loss_fn = partial(grpo_loss_fn, reduction="token_mean", c_clip=3.0)
"""The clipped surrogate of the token ratio exp(logprobs - old_logprobs), averaged over the tokens of the step.

The loss is that of GRPO with another reduction and a dual clip, and takes the same settings as `grpo_loss_fn`. PPO
differs by its advantages, which come from a critic (`advantages.gae`). The loss of the critic is `value_loss_fn`.
"""


def value_loss_fn(
    pack: DataPack, values: Tensor, *, cliprange_value: float = 0.5, value_loss_coef: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of the critic: the squared error to the returns, with a value clip.

    value_loss_coef * mean over tokens of max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), c = cliprange_value.
    The squared error is that of arXiv 1707.06347 eq. 9, without a further factor 1/2. The clip comes from PPO's
    reference implementation: a value does not gain from moving by more than c away from the old value.

    Statistics: value_loss (without value_loss_coef), value_clip_frac (the share of tokens whose clipped error is
        larger)
    and value_mean. returns and value_error = R - v are observations: 1 - (value_error_std / returns_std)^2 is the
    explained variance of the step.

    Args:
        pack: The micro-batch, with the old values and the returns.
        values: (N,) values of the trained critic, differentiable. Entry t is the value before token t.
        cliprange_value: c.
        value_loss_coef: Factor on the loss.

    Returns:
        The micro-batch's share of the step's loss (0-dim), and statistics by name.

    Raises:
        DataError: The pack has no values or returns.
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
