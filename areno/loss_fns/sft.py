"""The loss of supervised fine-tuning (SFT)."""

from __future__ import annotations

from torch import Tensor

from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.policy import entropy_stats


def sft_loss_fn(pack: DataPack, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the negative log-likelihood, averaged over all trained tokens of the optimizer step."""
    return -pack.token_mean(pack.trained(logprobs)), entropy_stats(pack)
