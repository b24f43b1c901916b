"""SFT: supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import entropy_stats


def sft_loss_fn(pack: DataPack, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the negative log-likelihood, averaged over all response tokens of the step.

    Args:
        pack: The micro-batch.
        logprobs: (N,) log-probabilities under the trained model, differentiable.

    Returns:
        The micro-batch's share of the step's loss (0-dim), and the entropy if the pack has it.
    """
    return -pack.token_mean(pack.trained(logprobs)), entropy_stats(pack)
