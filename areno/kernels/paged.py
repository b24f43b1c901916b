"""Attention of one new token per row to its keys and values in pages: the decode step.

Shape letters: B rows, H query heads, K key heads (H = K * G), C head dimension; P pages of S tokens; T table rows of W
page numbers each. Position n of the sequence in table row t lies in page `table[t, n // S]` at offset `n % S`.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


def paged_attention(
    q_BHC: Tensor, pages: Tensor, table_TW: Tensor, slots_B: Tensor, lengths_B: Tensor, max_len: int | None
) -> Tensor:
    """softmax(q k / sqrt(C)) v over the first `lengths_B` positions of each row's sequence: (B, H, C) in the type of q.

    pages: (2, P, S, K, C), keys then values. table_TW: int32. slots_B: int64, the table row of each batch row.
    lengths_B: int64, at least 1. max_len: a bound on them that the host knows, which keeps the plain torch form from
    reading whole table rows; the Triton kernel stops at each row's own length and does not look at it, so that a
    captured graph holds no number of one step.
    """
    kernel = triton_kernel() if q_BHC.is_cuda else None
    if kernel is not None:
        return kernel.paged_attention(q_BHC, pages, table_TW, slots_B, lengths_B)
    return paged_attention_reference(q_BHC, pages, table_TW, slots_B, lengths_B, max_len)


@functools.cache
def triton_kernel() -> ModuleType | None:
    """The module of the Triton kernel, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from areno.kernels import paged_triton

    return paged_triton


def paged_attention_reference(
    q_BHC: Tensor,
    pages: Tensor,
    table_TW: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    max_len: int | None = None,
) -> Tensor:
    """The same in plain torch: gather every row's pages up to `max_len`, then one masked attention over the batch."""
    n_rows, n_heads, head_dim = q_BHC.shape
    _, _, page_size, n_kv_heads, _ = pages.shape
    width = table_TW.shape[1] if max_len is None else -(-max_len // page_size)
    index = table_TW[slots_B, :width].flatten()
    k_BKLC, v_BKLC = (
        part.index_select(0, index).view(n_rows, width * page_size, n_kv_heads, head_dim).transpose(1, 2)
        for part in pages
    )
    # The query heads that share a key head take the place of query positions, so keys and values are not repeated.
    q_BKGC = q_BHC.reshape(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    mask = torch.arange(width * page_size, device=q_BHC.device) < lengths_B[:, None, None, None]
    return F.scaled_dot_product_attention(q_BKGC, k_BKLC, v_BKLC, attn_mask=mask).reshape(n_rows, n_heads, head_dim)
