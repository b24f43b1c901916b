"""Drawing tokens from logits: a counter-based random number, an inverse CDF, and the log-probability.

The Triton kernels read the logits once. They follow the same rule as the torch reference, so both draw the same tokens
unless a random number falls on the border of two tokens to within rounding.

Shape letters: B rows (one token to draw for each), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.backend import use_triton
from areno.kernels.sampling.reference import SamplingSettings, sample_key, sample_tokens, uniform

__all__ = ["SamplingSettings", "sample_key", "sample_slots"]


def sample_slots(
    logits_BV: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    *,
    filtered: bool,
    banned: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Draw one token for each row with the settings of its slot, and note it in `settings.last_token`.

    positions_B: int64, which token of the completion is drawn. filtered: whether some row has a top-k or top-p.
    banned: (rows, token ids) that must not be drawn. Returns (2, B) float64, tokens and log-probabilities, so that
    they travel together; a log-probability of NaN tells that the logits were not finite.
    """
    if banned is None and use_triton(logits_BV):  # the kernels know no bans, which are rare
        from areno.kernels.sampling import triton

        return triton.sample_slots(logits_BV, slots_B, positions_B, settings, filtered=filtered)
    tokens_B, logprobs_B = sample_tokens(
        logits_BV,
        settings.temperature[slots_B],
        settings.greedy[slots_B],
        uniform(settings.key[slots_B], positions_B),
        top_k_B=settings.top_k[slots_B] if filtered else None,
        top_p_B=settings.top_p[slots_B] if filtered else None,
        banned=banned,
    )
    settings.last_token[slots_B] = tokens_B
    return torch.stack((tokens_B.double(), logprobs_B.double()))
