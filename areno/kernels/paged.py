"""Attention of one new token per row to its keys and values in pages: the decode step.

Shape letters: B rows, H query heads, K key heads (H = K * G), C head dimension; P pages of S tokens; T table rows of W
page numbers each; M teams of at most R rows. Position n of the sequence in table row t lies in page `table[t, n // S]`
at offset `n % S`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from areno.kernels.fused import fused_kernels

TEAM_SIZE = 8  # rows whose shared positions are read together


@dataclass(slots=True)
class Batch:
    """Where the rows of a decode step have their keys and values.

    table_TW: int32. slots_B: int64, the table row of each batch row. lengths_B: int64, positions of each row with the
    new token, which is the last of them; at least 1.

    shared_B: int64, how many of a row's first positions are read together with the other rows of its team: whole pages,
    fewer than its length; 0 for rows without a team. teams_MR: int64, batch rows that share these positions, each row
    in one team at most; filled up with -1 at the end, a team of none is all -1. None: no teams.

    spans: int64 (2,), how many of its own positions a row, and of its shared ones a team, gives to one piece of work;
    splits: how many pieces that makes at most. They change the speed, not the result.

    max_len: a bound on lengths_B that the host knows, which keeps the plain torch form from reading whole table rows.
    The Triton kernel stops at each row's own length and does not look at it, so that a captured graph holds no number
    of one step.
    """

    table_TW: Tensor
    slots_B: Tensor
    lengths_B: Tensor
    shared_B: Tensor
    spans: Tensor
    teams_MR: Tensor | None = None
    splits: tuple[int, int] = (1, 1)
    max_len: int | None = None


def decode_attention(q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, pages: Tensor, batch: Batch) -> Tensor:
    """Put each row's new key and value at its last position; softmax(q k / sqrt(C)) v over all its positions.

    pages: (2, P, S, K, C), keys then values, changed in place. Returns (B, H, C) in the type of q.
    """
    kernel = triton_kernel(q_BHC)
    if kernel is not None:
        return kernel.decode_attention(q_BHC, k_BKC, v_BKC, pages, batch)
    return decode_attention_reference(q_BHC, k_BKC, v_BKC, pages, batch)


def triton_kernel(x: Tensor) -> ModuleType | None:
    """The module of the Triton kernels, where they can be used."""
    if fused_kernels(x) is None:
        return None
    from areno.kernels import paged_triton

    return paged_triton


def decode_attention_reference(q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, pages: Tensor, batch: Batch) -> Tensor:
    """The same in plain torch: gather every row's pages up to `max_len`, then one masked attention over the batch."""
    n_rows, n_heads, head_dim = q_BHC.shape
    _, _, page_size, n_kv_heads, _ = pages.shape
    last_B = batch.lengths_B - 1
    places_B = batch.table_TW[batch.slots_B, last_B // page_size].long() * page_size + last_B % page_size
    for part, new in zip(pages.flatten(1, 2), (k_BKC, v_BKC), strict=True):
        part.index_copy_(0, places_B, new)
    width = batch.table_TW.shape[1] if batch.max_len is None else -(-batch.max_len // page_size)
    index = batch.table_TW[batch.slots_B, :width].flatten()
    k_BKLC, v_BKLC = (
        part.index_select(0, index).view(n_rows, width * page_size, n_kv_heads, head_dim).transpose(1, 2)
        for part in pages
    )
    # The query heads that share a key head take the place of query positions, so keys and values are not repeated.
    q_BKGC = q_BHC.reshape(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    mask = torch.arange(width * page_size, device=q_BHC.device) < batch.lengths_B[:, None, None, None]
    return F.scaled_dot_product_attention(q_BKGC, k_BKLC, v_BKLC, attn_mask=mask).reshape(n_rows, n_heads, head_dim)
