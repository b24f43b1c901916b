"""Sampling of tokens from logits, with the log-probability of each token.

A token is chosen by the inverse CDF at a counter-based random number. The Triton kernels read the logits once. They
follow the same rule as the torch reference, so both sample the same tokens, unless a random number falls on the border
between two tokens up to rounding.

`slots_B` has the index of each row in `settings`, whose `last_token` and `counts` are updated. `positions_B` is the
index in the completion of the token to sample. Both are int64. Logits are float32. Results are (2, B) float64: token
ids, and their log-probabilities under softmax(logits / temperature) before bans, penalties, top-k, top-p and the
exclusion of ids without a text. These are NaN if the row's logits have a NaN or +inf.

Shape letters: B rows (one token is sampled for each), V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.backend import can_use_triton, dispatch_by_device
from areno.kernels.sampling import drafts, reference
from areno.kernels.sampling.drafts import CONTEXT, LEVELS, NgramTable, add_texts
from areno.kernels.sampling.random_keys import sample_keys
from areno.kernels.sampling.reference import DecodableIds, SamplingFlags, SamplingSettings

__all__ = [
    "CONTEXT",
    "LEVELS",
    "DecodableIds",
    "NgramTable",
    "SamplingFlags",
    "SamplingSettings",
    "add_texts",
    "can_sample_columns",
    "can_sample_hidden",
    "draft_tokens",
    "sample_keys",
    "sample_slots",
]

# On an H100, 1,024 rows of 152k logits take 330 instead of 569 us with 384 inputs, 699 instead of 781 us with 1,024,
# and 1,734 instead of 1,384 us with 2,560: the product without stored logits is slower than the library's.
_LEAST_ROWS, _MOST_INPUTS = 32, 1024


sample_slots = dispatch_by_device(reference.sample_slots)
"""Sample one token for each row. The logits may be overwritten."""


def can_sample_hidden(hidden_BD: Tensor, flags: SamplingFlags) -> bool:
    """Return whether `sample_hidden` of `triton_head.py` supports the rows, and is faster than `sample_slots`.

    False without Triton or half precision, and with top-k, top-p, bans, penalties or masks, which need stored logits.
    """
    n_rows, width = hidden_BD.shape
    is_faster = n_rows >= _LEAST_ROWS and width <= _MOST_INPUTS and hidden_BD.element_size() == 2
    return is_faster and flags == SamplingFlags() and can_use_triton(hidden_BD)


def can_sample_columns(logits_BV: Tensor, flags: SamplingFlags) -> bool:
    """Return whether `sample_columns` of `triton.py` supports the rows. False with top-k, top-p, penalties or masks."""
    return can_use_triton(logits_BV) and not (flags.filtered or flags.penalized or flags.masked)


draft_tokens = dispatch_by_device(drafts.draft_tokens)
"""Draft the next J = `n_tokens` tokens of each row, (B, J) int64, for speculative decoding.

Each token is drafted from the entry of one suffix of the row: the first suffix in the order of LEVELS that has an
entry in the table. The entry lists tokens that followed this suffix before. One of the listed tokens is drawn by
inverse CDF, in the order of token ids, with the random number that `sample_slots` uses at this position. If the
listed tokens resemble the policy's distribution, the drafted and the sampled token mostly agree, also where the
policy is undecided. A greedy row gets the most frequent of the listed tokens.

`contexts_WB` are the last CONTEXT tokens of each row, the last one first, and -1 before the text begins. Drafts are
-1 from the first token on for which the table has no entry.
"""
