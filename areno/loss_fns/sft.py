"""SFT: supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import entropy_stats


def sft_loss_fn(pack: DataPack, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood, mean over all response tokens of the step. logprobs: (N,), differentiable."""
    return -pack.token_mean(pack.trained(logprobs)), entropy_stats(pack)
