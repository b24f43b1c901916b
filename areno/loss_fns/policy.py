"""How the losses of tokens become one number. The choice changes what is optimised, so it has a name.

With rows i, their trained tokens t and T_i of them:
seq_mean_token_mean      mean_i 1/T_i sum_t    GRPO (arXiv 2402.03300 eq. 3): every row weighs the same
token_mean               sum_it / sum_i T_i    DAPO (arXiv 2503.14476 eq. 8): every token weighs the same
seq_mean_token_sum_norm  mean_i 1/L sum_t      Dr.GRPO (arXiv 2503.20783 sec. 3.2): a constant L, so length has no pull

What the policy losses share: their statistics, and the KL term.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from areno.loss_fns.kl import KLEstimator, kl_per_token
from areno.loss_fns.pack import DataPack

Reduction = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


def reduce_tokens(pack: DataPack, values_T: Tensor, reduction: Reduction, norm_length: float | None = None) -> Tensor:
    """(T,) values of trained tokens -> 0-dim: this micro-batch's share of the step's value.

    norm_length: the constant L of seq_mean_token_sum_norm, in tokens (usually the longest completion allowed).
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
