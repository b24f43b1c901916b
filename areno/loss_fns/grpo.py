"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300 eq. 3), with the reductions of its successors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import token_policy_loss
from areno.loss_fns.reduction import Reduction


def grpo_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    reduction: Reduction = "seq_mean_token_mean",
    c_clip: float | None = None,
    **settings: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of the token ratio exp(logprobs - old_logprobs), plus kl_coef times the KL to ref_logprobs.

    Every row weighs the same, as in the paper; `reduction` says otherwise (DAPO: "token_mean", Dr.GRPO:
    "seq_mean_token_sum_norm"). The other settings, with their defaults, are those of `policy.token_policy_loss`.
    """
    return token_policy_loss(pack, logprobs, reduction=reduction, c_clip=c_clip, **settings)
