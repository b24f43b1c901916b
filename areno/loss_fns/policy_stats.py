"""What every policy loss reports about the tokens it trains on."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.pack import DataPack


def policy_stats(pack: DataPack, advantages: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """advantages, log_ratio: (T,). All results are 0-dim shares of means over the step's trained tokens.

    advantage_mean; approx_kl: KL(sampling policy || trained policy) by the estimator r - log r - 1 with r = trained /
    sampling, how far the policy has moved since the rows were sampled; entropy where the pack has it.
    """
    log_ratio = log_ratio.detach()
    stats = {
        "advantage_mean": pack.token_mean(advantages),
        "approx_kl": pack.token_mean(torch.expm1(log_ratio) - log_ratio),
    }
    return stats | entropy_stats(pack)


def entropy_stats(pack: DataPack) -> dict[str, Tensor]:
    """the entropy of the next-token distribution, mean over the step's trained tokens, in nats."""
    return {} if pack.entropy is None else {"entropy": pack.token_mean(pack.trained(pack.entropy))}
