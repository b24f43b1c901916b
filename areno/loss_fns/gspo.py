"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071): ratio, clip and reward all belong to the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.kl import KLEstimator, kl_per_token
from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy_stats import policy_stats
from areno.loss_fns.ratio import bounded, clipped_surrogate
from areno.loss_fns.reduction import reduce_tokens


def gspo_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    clip_eps: float = 3e-4,
    clip_eps_higher: float | None = None,
    c_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of s = exp(mean_t(logprobs - old_logprobs)) of each row, mean over rows (eq. 5-7).

    logprobs: (N,) of the trained policy, differentiable. Needs old_logprobs and advantages, and ref_logprobs where
    kl_coef is not 0. A row's advantage is the mean of its tokens' (all equal where it comes from the row's reward).
    The KL is the mean over the row's tokens, then over rows.
    """
    logprobs_T, advantages_T = pack.trained(logprobs), pack.trained(pack.need("advantages"))
    log_ratio_T = logprobs_T - pack.trained(pack.need("old_logprobs"))
    ratio_R = torch.exp(bounded(pack.mean_rows(log_ratio_T)))
    # The advantage of a row without trained tokens is 0 here, and so is its surrogate.
    surrogate_R, cut = clipped_surrogate(ratio_R, pack.mean_rows(advantages_T), clip_eps, clip_eps_higher, c_clip)
    loss = policy_loss = pack.row_mean(surrogate_R)
    stats = policy_stats(pack, advantages_T, bounded(log_ratio_T))
    stats |= {name: pack.row_mean(mask) for name, mask in cut.items()}
    stats |= {
        "policy_loss": policy_loss.detach(),
        "clip_frac": stats["clip_frac_low"] + stats["clip_frac_high"],
        "ratio": ratio_R.detach()[pack.row_lengths() > 0],
    }
    if kl_coef:
        kl_T = kl_per_token(logprobs_T, pack.trained(pack.need("ref_logprobs")), kl_estimator)
        kl_loss = reduce_tokens(pack, kl_T, "seq_mean_token_mean")
        stats["kl_loss"] = kl_loss.detach()
        loss = policy_loss + kl_coef * kl_loss
    return loss, stats
