"""Paged attention of a decode step: one new token for each row, with its keys and values in blocks.

Shape letters as in `reference.py`.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.backend import form
from areno.kernels.paged.reference import PagedBatch, most_rows

__all__ = ["PagedBatch", "decode_attention", "most_rows"]


def decode_attention(
    q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, kv_blocks: Tensor, batch: PagedBatch, window: int | None = None
) -> Tensor:
    """Write each row's new key and value to its last position; return softmax(q k / sqrt(C)) v over all its positions.

    kv_blocks: (2, P, S, K, C), keys then values, changed in place. The result is (B, H, C) in the dtype of q.
    window: how many positions a row sees, its last ones; None is all. Blocks before them may hold anything finite.
    """
    return form(q_BHC, __name__).decode_attention(q_BHC, k_BKC, v_BKC, kv_blocks, batch, window)
