"""Paged attention for a decoding step: one new token per row, with keys and values in blocks of the KV cache.

`decode_attention` runs as Triton kernels or as the torch reference. `PagedBatch` holds the block tables of the step.

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
    """Write the new keys and values to the cache, and return softmax(q k / sqrt(C)) v over each row's positions.

    Args:
        q_BHC: queries of the new tokens, shape (rows, heads, head dim).
        k_BKC: keys of the new tokens, written to the cache at the last position of each row.
        v_BKC: values of the new tokens, written to the same positions.
        kv_blocks: the KV cache (2, blocks, positions per block, key heads, head dim), keys then values, changed in
            place.
        batch: block tables and lengths of the rows.
        window: size of the sliding window: a row attends to its last `window` positions, including the new token. None
            means all positions. With a window, blocks before it may hold any finite values.

    Returns:
        The output (B, H, C) in the dtype of q.
    """
    return form(q_BHC, __name__).decode_attention(q_BHC, k_BKC, v_BKC, kv_blocks, batch, window)
