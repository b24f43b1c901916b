"""Drawing tokens from logits: a counter-based random number, an inverse CDF, and the log-probability.

The Triton kernels read the logits once. They follow the same rule as the torch reference, so both draw the same tokens
unless a random number falls on the border of two tokens to within rounding.

Shape letters: B rows (one token to draw for each), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from areno.kernels.backend import use_triton
from areno.kernels.sampling import reference
from areno.kernels.sampling.reference import SamplingFlags, SamplingSettings, sample_key

__all__ = ["SamplingFlags", "SamplingSettings", "draws_columns", "sample_columns", "sample_key", "sample_slots"]


def sample_slots(
    logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings, flags: SamplingFlags
) -> Tensor:
    """Draw one token for each row with the settings of its slot, and note it in `settings.last_token` and `counts`.

    logits_BV: float32; bans and penalties may be written into it. positions_B: int64, which token of the completion is
    drawn. flags: what some row needs. Returns (2, B) float64, tokens and log-probabilities of the policy, so that they
    travel together; a log-probability of NaN tells that the logits were not finite.
    """
    if not use_triton(logits_BV):
        return reference.sample_slots(logits_BV, slots_B, positions_B, settings, flags)
    from areno.kernels.sampling import triton

    return triton.sample_slots(logits_BV, slots_B, positions_B, settings, flags)


def draws_columns(logits_BV: Tensor, flags: SamplingFlags) -> bool:
    """Whether `sample_columns` can draw what rows with these flags need."""
    return use_triton(logits_BV) and not (flags.filtered or flags.penalized or flags.masked)


def sample_columns(
    columns_BV: Tensor,
    vocab: int,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    flags: SamplingFlags,
    rank: int,
    every: Callable[[Tensor], Tensor],
) -> Tensor:
    """What `sample_slots` returns, where each rank of a group has equally many columns of the logits.

    The ranks exchange a few numbers of each row. Only the rank that has a drawn token notes it.
    columns_BV: this rank's, float32; those behind the vocabulary are of no token. every: gives (ranks, *x.shape), x of
    each.
    """
    from areno.kernels.sampling import triton

    return triton.sample_columns(columns_BV, vocab, slots_B, positions_B, settings, flags, rank, every)
