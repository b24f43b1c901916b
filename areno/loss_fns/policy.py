"""What the policy losses share: their statistics, and the KL term."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.kl import KLEstimator, kl_per_token
from areno.loss_fns.pack import DataPack
from areno.loss_fns.reduction import Reduction, reduce_tokens


def policy_stats(pack: DataPack, advantages: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """Compute the statistics that all policy losses report, each a share of a mean over the step's trained tokens.

    Args:
        pack: The micro-batch.
        advantages: (T,).
        log_ratio: (T,), logarithm of the importance ratio.

    Returns:
        0-dim tensors by name: advantage_mean; approx_kl, KL(old policy || trained policy) by the estimator
        r - log r - 1, the distance that the updates of this batch have moved the policy; entropy where the pack has it.
    """
    log_ratio = log_ratio.detach()
    stats = {
        "advantage_mean": pack.token_mean(advantages),
        "approx_kl": pack.token_mean(torch.expm1(log_ratio) - log_ratio),
    }
    return stats | entropy_stats(pack)


def entropy_stats(pack: DataPack) -> dict[str, Tensor]:
    """Return the entropy of the next-token distribution, mean over the step's trained tokens, in nats."""
    return {} if pack.entropy is None else {"entropy": pack.token_mean(pack.trained(pack.entropy))}


def surrogate_stats(how: dict[str, Tensor], policy_loss: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """What every surrogate reports: its own means, their clip_frac where it clips, policy_loss, and the ratios seen."""
    stats = {**how, "policy_loss": policy_loss.detach(), "ratio": ratio.detach()}
    if "clip_frac_low" in how:
        stats["clip_frac"] = how["clip_frac_low"] + how["clip_frac_high"]
    return stats


def add_kl(
    pack: DataPack,
    policy_loss: Tensor,
    logprobs_T: Tensor,
    stats: dict[str, Tensor],
    kl_coef: float,
    kl_estimator: KLEstimator,
    reduction: Reduction,
    norm_length: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """policy_loss + kl_coef * KL to the reference, and stats with kl_loss; without a reference where kl_coef is 0."""
    if not kl_coef:
        return policy_loss, stats
    kl_T = kl_per_token(logprobs_T, pack.trained(pack.need("ref_logprobs")), kl_estimator)
    kl_loss = reduce_tokens(pack, kl_T, reduction, norm_length)
    return policy_loss + kl_coef * kl_loss, {**stats, "kl_loss": kl_loss.detach()}
