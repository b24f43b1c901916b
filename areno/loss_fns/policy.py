"""Functions that the policy losses share: the reduction over tokens, statistics and the KL term.

The reduction changes the objective, so each reduction has a name. With rows i and their T_i trained tokens t:

    seq_mean_token_mean      mean_i 1/T_i sum_t    GRPO (arXiv 2402.03300 eq. 3): every row weighs the same
    token_mean               sum_it / sum_i T_i    DAPO (arXiv 2503.14476 eq. 8): every token weighs the same
    seq_mean_token_sum_norm  mean_i 1/L sum_t      Dr.GRPO (arXiv 2503.20783 sec. 3.2): L is a constant, so the length
                                                   of a row has no pull
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from areno.loss_fns.kl import KLEstimator, kl_per_token
from areno.loss_fns.pack import DataPack

Reduction = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


def reduce_tokens(pack: DataPack, values_T: Tensor, reduction: Reduction, norm_length: float | None = None) -> Tensor:
    """Reduce token values to a scalar: the micro-batch's share of the average over the optimizer step.

    Args:
        pack: The micro-batch.
        values_T: (T,) values of trained tokens.
        reduction: "seq_mean_token_mean" averages over the tokens of each row and then over rows. "token_mean" averages
            over all tokens. "seq_mean_token_sum_norm" sums over the tokens of each row, divides by norm_length and
            averages over rows.
        norm_length: The divisor of seq_mean_token_sum_norm in tokens, usually the longest completion allowed. The other
            reductions ignore it.

    Returns:
        A 0-dim tensor.

    Raises:
        ValueError: The reduction is unknown, or is seq_mean_token_sum_norm without a positive norm_length.
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
        advantages: (T,) advantages of the trained tokens.
        log_ratio: (T,) logarithms of the importance ratios r.

    Returns:
        0-dim tensors by name. advantage_mean is the mean advantage. approx_kl estimates KL(old policy || trained
        policy) as the mean of r - log r - 1. entropy is the mean entropy in nats, and is absent if the pack has no
        entropy.
    """
    log_ratio = log_ratio.detach()
    stats = {
        "advantage_mean": pack.token_mean(advantages),
        "approx_kl": pack.token_mean(torch.expm1(log_ratio) - log_ratio),
    }
    return stats | entropy_stats(pack)


def entropy_stats(pack: DataPack) -> dict[str, Tensor]:
    """Return the entropy of the next-token distribution, averaged over the step's trained tokens.

    Args:
        pack: The micro-batch.

    Returns:
        {"entropy": the micro-batch's share of the mean, 0-dim, in nats}. An empty dictionary if the pack has no
        entropy.
    """
    return {} if pack.entropy is None else {"entropy": pack.token_mean(pack.trained(pack.entropy))}


def surrogate_stats(how: dict[str, Tensor], policy_loss: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """Collect the statistics that a policy loss reports about its surrogate.

    Args:
        how: The surrogate's own statistics by name, each the micro-batch's share of a mean over the step.
        policy_loss: The reduced loss of the surrogate, 0-dim.
        ratio: 1-dim importance ratios of tokens or rows, logged as observations.

    Returns:
        The entries of `how`, and detached policy_loss and ratio. Surrogates that clip also have clip_frac, the sum
        of clip_frac_low and clip_frac_high.
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
    """Add kl_coef times the KL to the reference model to a policy loss.

    Args:
        pack: The micro-batch. It needs ref_logprobs if kl_coef is not 0.
        policy_loss: The reduced policy loss, 0-dim.
        logprobs_T: (T,) log-probabilities under the trained policy, differentiable.
        stats: Statistics by name, to which kl_loss is added.
        kl_coef: Coefficient of the KL. 0 returns the loss and the statistics unchanged.
        kl_estimator: Estimator of the KL: "k1", "k2" or "k3" (formulas in areno/loss_fns/kl.py).
        reduction: How the KL is averaged over tokens and rows, see `reduce_tokens`.
        norm_length: Divisor, in tokens, of reduction "seq_mean_token_sum_norm".

    Returns:
        (loss, statistics): the 0-dim sum, and a dictionary with the statistics and kl_loss, the reduced KL without the
        coefficient.

    Raises:
        DataError: kl_coef is not 0 and the pack has no ref_logprobs.
    """
    if not kl_coef:
        return policy_loss, stats
    kl_T = kl_per_token(logprobs_T, pack.trained(pack.need("ref_logprobs")), kl_estimator)
    kl_loss = reduce_tokens(pack, kl_T, reduction, norm_length)
    return policy_loss + kl_coef * kl_loss, {**stats, "kl_loss": kl_loss.detach()}
