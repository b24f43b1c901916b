"""Paged attention of a decode step: one new token for each row, with keys and values in blocks of the KV cache.

`decode_attention` runs as Triton kernels or as the torch reference. `PagedBatch` holds its block tables.
Shape letters: B rows, H query heads, K key heads (H is a multiple of K), C head dimension; P blocks of S positions.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.backend import form
from areno.kernels.paged.reference import PagedBatch, max_group_rows

__all__ = ["PagedBatch", "decode_attention", "max_group_rows"]


def decode_attention(
    q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, kv_blocks: Tensor, batch: PagedBatch, window: int | None = None
) -> Tensor:
    """Write the new keys and values to the cache, and return softmax(q k / sqrt(C)) v over all positions of a row.

    Args:
        q_BHC: queries of the new tokens.
        k_BKC: keys of the new tokens, written to the last position of each row.
        v_BKC: values of the new tokens, written there too.
        kv_blocks: the cache (2, P, S, K, C), keys then values, changed in place.
        batch: block tables and lengths of the rows.
        window: the number of last positions that a row attends to. None: all. Blocks before the window may hold any
            finite numbers.

    Returns:
        (B, H, C) in the dtype of q.
    """
    return form(q_BHC, __name__).decode_attention(q_BHC, k_BKC, v_BKC, kv_blocks, batch, window)
