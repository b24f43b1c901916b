"""PPO: Proximal Policy Optimization (arXiv 1707.06347 eq. 7) of tokens, with the dual clip (arXiv 1912.09729 eq. 5)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import token_policy_loss
from areno.loss_fns.reduction import Reduction


def ppo_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    reduction: Reduction = "token_mean",
    c_clip: float | None = 3.0,
    **settings: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of the token ratio exp(logprobs - old_logprobs), mean over the tokens of the step.

    The advantages come from `advantages.gae`; the critic has its own loss, `value.value_loss_fn`. The other settings,
    with their defaults, are those of `policy.token_policy_loss`.
    """
    return token_policy_loss(pack, logprobs, reduction=reduction, c_clip=c_clip, **settings)
