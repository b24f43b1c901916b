"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071): ratio, clip and reward all belong to the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.kl import KLEstimator
from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import add_kl, policy_stats, surrogate_stats
from areno.loss_fns.surrogates import bounded, clipped_surrogate, token_log_ratio


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
    kl_coef is not 0. A row's advantage is the mean of its tokens' (all equal where it comes from the row's reward), and
    the factor on its policy loss is the mean of its tokens' `pack.weights`: the row is the unit here, and a token
    whose weight was set to 0 takes its part of the row away. The KL is the mean over the row's tokens, then over rows.
    For advantages that differ within a row: GSPO-token, `grpo_loss_fn` with importance_sampling_level "sequence".
    """
    logprobs_T, advantages_T = pack.trained(logprobs), pack.trained(pack.need("advantages"))
    log_ratio_T, weights_T = token_log_ratio(pack, logprobs_T, "recompute")
    stats = policy_stats(pack, advantages_T, bounded(log_ratio_T))
    trained_rows = pack.row_lengths() > 0
    ratio_R = torch.exp(bounded(pack.mean_rows(log_ratio_T)))
    # The advantage of a row without trained tokens is 0 here, and so is its surrogate.
    policy_R, cut_R = clipped_surrogate(ratio_R, pack.mean_rows(advantages_T), clip_eps, clip_eps_higher, c_clip)
    if weights_T is not None:
        weights_R = pack.mean_rows(weights_T)
        policy_R = policy_R * weights_R
        stats["weights"] = weights_R.detach()[trained_rows]

    policy_loss = pack.row_mean(policy_R)
    cut = {name: pack.row_mean(mask_R) for name, mask_R in cut_R.items()}
    stats |= surrogate_stats(cut, policy_loss, ratio_R[trained_rows])
    return add_kl(pack, policy_loss, logprobs_T, stats, kl_coef, kl_estimator, "seq_mean_token_mean")
