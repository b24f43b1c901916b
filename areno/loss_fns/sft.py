"""The loss of supervised fine-tuning (SFT)."""

from __future__ import annotations

from torch import Tensor

from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import entropy_stats


def sft_loss_fn(pack: DataPack, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the negative log-likelihood, averaged over all trained tokens of the optimizer step.

    Args:
        pack: The micro-batch.
        logprobs: (N,) log-probabilities under the trained model, differentiable.

    Returns:
        (loss, statistics): the micro-batch's share of the step's loss, a 0-dim tensor, and {"entropy": share in
        nats}, which is empty if the pack has no entropy.
    """
    return -pack.token_mean(pack.trained(logprobs)), entropy_stats(pack)
