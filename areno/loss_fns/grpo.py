"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300 eq. 3), with the reductions of its successors."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.kl import KLEstimator, kl_per_token
from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy_stats import policy_stats
from areno.loss_fns.ratio import bounded, clipped_surrogate
from areno.loss_fns.reduction import Reduction, reduce_tokens


def grpo_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_higher: float | None = None,
    c_clip: float | None = None,
    reduction: Reduction = "seq_mean_token_mean",
    norm_length: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of the token ratio exp(logprobs - old_logprobs), plus kl_coef times the KL to ref_logprobs.

    logprobs: (N,) of the trained policy, differentiable. Needs old_logprobs and advantages, and ref_logprobs where
    kl_coef is not 0. KL and surrogate are reduced alike, as in the paper.
    """
    logprobs_T, advantages_T = pack.trained(logprobs), pack.trained(pack.need("advantages"))
    log_ratio_T = bounded(logprobs_T - pack.trained(pack.need("old_logprobs")))
    ratio_T = torch.exp(log_ratio_T)
    surrogate_T, cut = clipped_surrogate(ratio_T, advantages_T, clip_eps, clip_eps_higher, c_clip)
    loss = policy_loss = reduce_tokens(pack, surrogate_T, reduction, norm_length)
    stats = policy_stats(pack, advantages_T, log_ratio_T)
    stats |= {name: pack.token_mean(mask) for name, mask in cut.items()}
    stats |= {
        "policy_loss": policy_loss.detach(),
        "clip_frac": stats["clip_frac_low"] + stats["clip_frac_high"],
        "ratio": ratio_T.detach(),
    }
    if kl_coef:
        kl_T = kl_per_token(logprobs_T, pack.trained(pack.need("ref_logprobs")), kl_estimator)
        kl_loss = reduce_tokens(pack, kl_T, reduction, norm_length)
        stats["kl_loss"] = kl_loss.detach()
        loss = policy_loss + kl_coef * kl_loss
    return loss, stats
