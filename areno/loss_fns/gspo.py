"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071), with one clipped importance ratio per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.kl import KLEstimator
from areno.loss_fns.policy import add_kl, policy_stats, surrogate_stats
from areno.loss_fns.surrogates import Clip, clamp_log_ratio, token_log_ratio
from areno.schema.fields import partial_section


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
    """Compute the loss of GSPO: the clipped surrogate with one importance ratio per row, averaged over rows.

    The ratio of a row is exp(mean_t(logprobs - old_logprobs)) (arXiv 2507.18071 eq. 5-7). A row's advantage is the mean
    of its tokens' advantages, which are all equal if they come from the row's reward. A row's policy loss is multiplied
    by the mean of `pack.weights` over its tokens, so a token with weight 0 reduces the factor of its whole row. The KL
    is averaged over the tokens of each row, and then over rows. For advantages that differ within a row use GSPO-token,
    `grpo_loss_fn` with importance_sampling_level "sequence".

    Args:
        pack: The micro-batch, with old_logprobs and advantages. A kl_coef above 0 needs ref_logprobs.
        logprobs: (N,) log-probabilities under the trained policy, differentiable.
        clip_eps: The ratio is clipped to at least 1 - clip_eps.
        clip_eps_higher: The ratio is clipped to at most 1 + clip_eps_higher. None uses clip_eps.
        c_clip: Bound of the dual clip: the loss of a row with advantage A < 0 is at most -c_clip A. None: no dual clip.
        kl_coef: Coefficient of the KL to the reference model. 0 computes no KL.
        kl_estimator: "k1", "k2" or "k3" (formulas in areno/loss_fns/kl.py).
    """
    logprobs_T, advantages_T = pack.trained(logprobs), pack.trained(pack.need("advantages"))
    log_ratio_T, weights_T = token_log_ratio(pack, logprobs_T, "recompute")
    stats = policy_stats(pack, advantages_T, clamp_log_ratio(log_ratio_T))
    ratio_R = torch.exp(clamp_log_ratio(pack.mean_rows(log_ratio_T)))
    # The advantage of a row without trained tokens is 0 here, and so is its surrogate.
    # Not Clip(...), which would check the values as those of a configuration, in every micro-batch.
    clip = partial_section(Clip, {"eps_clip": clip_eps, "eps_clip_higher": clip_eps_higher, "c_clip": c_clip})
    policy_R, cut_R = clip.surrogate_loss(ratio_R, pack.mean_rows(advantages_T))
    if weights_T is not None:
        weights_R = pack.mean_rows(weights_T)
        policy_R = policy_R * weights_R
        stats["weights"] = pack.of_trained_rows(weights_R.detach())

    policy_loss = pack.row_mean(policy_R)
    cut = {name: pack.row_mean(mask_R) for name, mask_R in cut_R.items()}
    stats |= surrogate_stats(cut, policy_loss, pack.of_trained_rows(ratio_R))
    return add_kl(pack, policy_loss, logprobs_T, stats, kl_coef, kl_estimator, "seq_mean_token_mean")
