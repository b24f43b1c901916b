"""Functions that the policy losses share: the reduction over tokens, statistics and the KL term.

The reduction changes the objective, so each reduction has a name. With rows i and their T_i trained tokens t:

    seq_mean_token_mean      mean_i 1/T_i sum_t    GRPO (arXiv 2402.03300 eq. 3): every row has the same weight
    token_mean               sum_it / sum_i T_i    DAPO (arXiv 2503.14476 eq. 8): every token has the same weight
    seq_mean_token_sum_norm  mean_i 1/L sum_t      Dr.GRPO (arXiv 2503.20783 sec. 3.2): L is a constant, so the weight
                                                   of a token does not depend on the length of its row
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.errors import DataError
from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.kl import KLEstimator, kl_per_token
from areno.loss_fns.surrogates import Reduction


def reduce_tokens(pack: DataPack, values_T: Tensor, reduction: Reduction, norm_length: float | None = None) -> Tensor:
    """Reduce (T,) values of trained tokens to the micro-batch's share of the average over the optimizer step, 0-dim.

    `norm_length` is L of seq_mean_token_sum_norm in tokens, usually the longest completion allowed.
    """
    if reduction == "seq_mean_token_mean":
        return pack.row_mean(pack.mean_rows(values_T))
    if reduction == "token_mean":
        return pack.token_mean(values_T)
    if reduction == "seq_mean_token_sum_norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(
                f"reduction seq_mean_token_sum_norm divides by norm_length, which is {norm_length}; give a positive "
                "number of tokens, such as gconfig.max_new_tokens"
            )
        return pack.row_mean(pack.sum_rows(values_T)) / norm_length
    raise ValueError(f"reduction is {reduction!r}; expected seq_mean_token_mean, token_mean or seq_mean_token_sum_norm")


def policy_stats(pack: DataPack, advantages: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """Return the statistics that all policy losses report, as `DataPack.token_mean` over trained tokens.

    `log_ratio` is (T,). approx_kl estimates KL(old policy || trained policy) as the mean of r - log r - 1. entropy, in
    nats, is absent if the pack has none.
    """
    log_ratio = log_ratio.detach()
    stats = {
        "advantage_mean": pack.token_mean(advantages),
        "approx_kl": pack.token_mean(torch.expm1(log_ratio) - log_ratio),
    }
    return stats | entropy_stats(pack)


def entropy_stats(pack: DataPack) -> dict[str, Tensor]:
    """Return the mean entropy in nats of the next-token distribution. Empty if the pack has no entropy."""
    return {} if pack.entropy is None else {"entropy": pack.token_mean(pack.trained(pack.entropy.detach()))}


def entropy_with_gradient(pack: DataPack) -> Tensor:
    """Return the entropy at trained tokens, (T,). Raises DataError if the training pass computes no gradient of it."""
    if not pack.need("entropy").requires_grad and torch.is_grad_enabled():
        raise DataError("this loss needs an entropy with a gradient; give Trainer.train differentiates_entropy=True")
    return pack.trained(pack.need("entropy"))


def surrogate_stats(how: dict[str, Tensor], policy_loss: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """Return `how`, the surrogate's own statistics, with policy_loss and ratio added, and clip_frac for a clip.

    clip_frac is the sum of clip_frac_low and clip_frac_high.
    """
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
    """Add kl_coef times the KL to the reference model to a policy loss. Returns (loss, statistics).

    The reduced KL becomes the statistic kl_loss. If kl_coef is 0, nothing changes, and ref_logprobs are not needed.
    """
    if not kl_coef:
        return policy_loss, stats
    kl_T = kl_per_token(logprobs_T, pack.trained(pack.need("ref_logprobs")), kl_estimator)
    kl_loss = reduce_tokens(pack, kl_T, reduction, norm_length)
    return policy_loss + kl_coef * kl_loss, {**stats, "kl_loss": kl_loss.detach()}
