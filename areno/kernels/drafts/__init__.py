"""Drafts of the next tokens of samples, from a table of the tokens that followed the same tokens before.

`reference.py` holds the table, and both the entry of texts and the drafts in plain torch. `triton.py` makes the same
drafts in one kernel.

Shape letters as in `reference.py`.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.backend import use_triton
from areno.kernels.drafts import reference
from areno.kernels.drafts.reference import CONTEXT, LEVELS, NgramTable, add_texts
from areno.kernels.sampling import SamplingSettings

__all__ = ["CONTEXT", "LEVELS", "NgramTable", "add_texts", "draft_tokens"]


def draft_tokens(
    table: NgramTable,
    contexts_WB: Tensor,
    scopes_B: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    n_tokens: int,
) -> Tensor:
    """Draft the next tokens of each row.

    The first of the longest suffixes of a row with an entry in the table decides each token. Among the tokens that
    followed this suffix before, the draft is the one at which their cumulated shares exceed the random number with
    which the sampler will draw the token. If the shares resemble the policy's probabilities, sampler and draft then
    mostly agree, also where the policy is undecided. A greedy row gets the most frequent of the tokens.

    Args:
        table: the table.
        contexts_WB: int64, the last W = CONTEXT tokens of each row, the last one first. -1 before the text begins.
        scopes_B: int64, number of the scope of each row.
        slots_B: int64, index of each row's entry (slot) in `settings`.
        positions_B: int64, index in the completion of the first drafted token.
        settings: sampling settings of all slots.
        n_tokens: number J of tokens to draft for each row.

    Returns:
        (B, J) int64. -1 from the first token on for which the table has no entry.
    """
    if not use_triton(contexts_WB):
        return reference.draft_tokens(table, contexts_WB, scopes_B, slots_B, positions_B, settings, n_tokens)
    from areno.kernels.drafts import triton

    return triton.draft_tokens(table, contexts_WB, scopes_B, slots_B, positions_B, settings, n_tokens)
