"""Sampling of tokens from logits: a counter-based random number, an inverse CDF, and the log-probability.

The Triton kernels read the logits once. They compute by the same rule as the torch reference, so both sample the same
tokens, unless a random number falls on the border of two tokens up to rounding.

Shape letters: B rows (one token is sampled for each), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from areno.kernels.backend import use_triton
from areno.kernels.sampling import reference
from areno.kernels.sampling.reference import SamplingFlags, SamplingSettings, sample_key

__all__ = ["SamplingFlags", "SamplingSettings", "can_sample_columns", "sample_columns", "sample_key", "sample_slots"]


def sample_slots(
    logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings, flags: SamplingFlags
) -> Tensor:
    """Sample one token for each row with the settings of its slot, and update `settings.last_token` and `counts`.

    Args:
        logits_BV: float32; bans and penalties may be written into it.
        slots_B: int64, the slot of each row.
        positions_B: int64, the index of the sampled token in the completion.
        settings: the sampling settings of all slots.
        flags: which operations some row needs.

    Returns:
        (2, B) float64: tokens, and their log-probabilities under the policy, in one tensor for one transfer. A
        log-probability is NaN if the row's logits were not finite.
    """
    if not use_triton(logits_BV):
        return reference.sample_slots(logits_BV, slots_B, positions_B, settings, flags)
    from areno.kernels.sampling import triton

    return triton.sample_slots(logits_BV, slots_B, positions_B, settings, flags)


def can_sample_columns(logits_BV: Tensor, flags: SamplingFlags) -> bool:
    """Return whether `sample_columns` supports the operations that some row needs.

    Args:
        logits_BV: logits; only the device counts.
        flags: which operations some row needs.
    """
    return use_triton(logits_BV) and not (flags.filtered or flags.penalized or flags.masked)


def sample_columns(
    columns_BV: Tensor,
    vocab: int,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    flags: SamplingFlags,
    rank: int,
    all_gather: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sample one token for each row from logits whose columns are divided equally over tensor-parallel ranks.

    The ranks exchange a few numbers of each row. Only the rank that holds a sampled token's column updates its slot.

    Args:
        columns_BV: float32, this rank's columns. Columns after the vocabulary are padding.
        vocab: the size of the vocabulary.
        slots_B: int64, the slot of each row.
        positions_B: int64, the index of the sampled token in the completion.
        settings: the sampling settings of all slots.
        flags: which operations some row needs, as `can_sample_columns` accepts them.
        rank: this rank.
        all_gather: returns x of each rank, (ranks, *x.shape).

    Returns:
        (2, B) float64 as of `sample_slots`, the same on every rank.
    """
    from areno.kernels.sampling import triton

    return triton.sample_columns(columns_BV, vocab, slots_B, positions_B, settings, flags, rank, all_gather)
