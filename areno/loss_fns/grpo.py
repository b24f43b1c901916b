"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300 eq. 3), and what its successors make of it.

    loss = reduce_t( w_t surrogate(r_t, A_t) ) + kl_coef reduce_t( kl_t )

r_t: importance ratio of the token, or of its row. A_t: its advantage. w_t: `pack.weights`, a factor on the policy term
and never on the KL. docs/algorithms.md says which paper chose which surrogate, ratio and reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.kl import KLEstimator
from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import Reduction, add_kl, policy_stats, reduce_tokens, surrogate_stats
from areno.loss_fns.surrogates import (
    ImportanceLevel,
    ProxMethod,
    Surrogate,
    bounded,
    cispo_surrogate,
    clipped_surrogate,
    sapo_surrogate,
    sequence_log_ratio,
    token_log_ratio,
)


def grpo_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    reduction: Reduction = "seq_mean_token_mean",
    clip_eps: float = 0.2,
    clip_eps_higher: float | None = None,
    c_clip: float | None = None,
    norm_length: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    importance_sampling_level: ImportanceLevel = "token",
    surrogate: Surrogate = "clip",
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
    prox_logp_method: ProxMethod = "recompute",
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss, and statistics. The defaults are GRPO.

    logprobs: (N,) of the trained policy, differentiable. Needs old_logprobs and advantages; ref_logprobs where kl_coef
    is not 0; staleness for prox_logp_method "loglinear" (`ratio.token_log_ratio`). `pack.weights` multiply.

    reduction, norm_length: `reduction.reduce_tokens`; policy term and KL are reduced alike.
    clip_eps, clip_eps_higher: of surrogates "clip" and "cispo"; c_clip: of "clip"; sapo_tau_*: of "sapo".
    importance_sampling_level: "sequence" gives each token its row's ratio (GSPO-token, `ratio.sequence_log_ratio`).
    """
    logprobs_T, advantages_T = pack.trained(logprobs), pack.trained(pack.need("advantages"))
    log_ratio_T, weights_T = token_log_ratio(pack, logprobs_T, prox_logp_method)
    stats = policy_stats(pack, advantages_T, bounded(log_ratio_T))
    if importance_sampling_level == "sequence":
        log_ratio_T = sequence_log_ratio(pack, log_ratio_T, logprobs_T)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level is {importance_sampling_level!r}; expected token or sequence")
    ratio_T = torch.exp(bounded(log_ratio_T))

    if surrogate == "clip":
        policy_T, how_T = clipped_surrogate(ratio_T, advantages_T, clip_eps, clip_eps_higher, c_clip)
    elif surrogate == "cispo":
        policy_T, how_T = cispo_surrogate(ratio_T, advantages_T, logprobs_T, clip_eps, clip_eps_higher)
    elif surrogate == "sapo":
        policy_T, how_T = sapo_surrogate(ratio_T, advantages_T, sapo_tau_pos, sapo_tau_neg)
    else:
        raise ValueError(f"surrogate is {surrogate!r}; expected clip, cispo or sapo")
    if weights_T is not None:
        policy_T = policy_T * weights_T
        stats["weights"] = weights_T.detach()

    policy_loss = reduce_tokens(pack, policy_T, reduction, norm_length)
    stats |= surrogate_stats({name: pack.token_mean(value) for name, value in how_T.items()}, policy_loss, ratio_T)
    return add_kl(pack, policy_loss, logprobs_T, stats, kl_coef, kl_estimator, reduction, norm_length)
