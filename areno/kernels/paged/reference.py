"""The inputs of a decode step's attention, and paged decode attention in plain torch.

The KV cache is divided into blocks. A block holds consecutive positions of one sequence, and a block table lists the
blocks of each sequence. Rows that sample the same prompt share its blocks. Up to GROUP_SIZE of these rows form a prefix
group, for which the shared blocks are read once.

Shape letters: B rows, H query heads, K key heads (H is a multiple of K), C head dimension; P blocks of S positions;
T rows of the block table, of W block numbers each; G prefix groups of at most R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areno.kernels.fixed_order import padded_attention

GROUP_SIZE = 8  # rows of a prefix group
_FIXED_ORDER_QUERIES = 16  # queries of a key head in a prefix group; more would let fewer programs run on a processor


def max_group_rows(heads_per_key: int, fixed_order: bool) -> int:
    """Return the largest number of rows in a prefix group.

    Args:
        heads_per_key: query heads that share a key head, H / K.
        fixed_order: whether attention runs in a fixed order (`PagedBatch.fixed_order`).
    """
    return min(GROUP_SIZE, max(2, _FIXED_ORDER_QUERIES // heads_per_key)) if fixed_order else GROUP_SIZE


@dataclass(slots=True)
class PagedBatch:
    """The block tables of a decode step, and the splits of its attention that run in parallel.

    A row has its own positions, and positions that it shares with its prefix group. Both are cut into splits.

    Attributes:
        table_TW: int32 block tables. Position n of the sequence in table row t lies in block `table[t, n // S]` at
            offset `n % S`.
        slots_B: int64, the table row of each batch row.
        lengths_B: int64, the number of positions of each row, at least 1. The last position is the new token.
        shared_lens_B: int64, how many of its first positions a row shares with its prefix group. They are whole blocks
            and fewer than lengths_B. 0 for a row outside of all groups.
        split_lens: int64 (2,), the number of positions in a split of a row's own positions, and in a split of a
            group's shared positions. Changes the speed, not the result, unless `fixed_order`.
        prefix_groups_GR: int64, the batch rows of each group, then -1. Unused groups are all -1. A row is in at most
            one group. None: there are no groups.
        splits: the largest number of splits of a row's own positions, and of a group's shared positions.
        fixed_order: compute exactly the numbers of `varlen_attention` with the backend "fixed_order". The splits are
            then the spans of `kernels.fixed_order`, shared_lens_B is the begin of a span, and split_lens[1] is the
            length of a group's first split in positions, a whole number of spans.
        pdl: attention may begin before the previous kernel has ended (`kernels/jit.py`). Neither the previous kernel
            nor one that may run at the same time may write a tensor of this batch. Changes the speed, not the result.
        max_len: an upper bound of lengths_B that the host knows. The torch reference reads no further. None: the whole
            width of the table. The Triton kernels read lengths_B on the device, so a CUDA graph stays valid.
    """

    table_TW: Tensor
    slots_B: Tensor
    lengths_B: Tensor
    shared_lens_B: Tensor
    split_lens: Tensor
    prefix_groups_GR: Tensor | None = None
    splits: tuple[int, int] = (1, 1)
    fixed_order: bool = False
    pdl: bool = False
    max_len: int | None = None


def decode_attention(
    q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, kv_blocks: Tensor, batch: PagedBatch, window: int | None = None
) -> Tensor:
    """Gather the keys and values of every row up to `max_len`, and compute one masked attention over the batch.

    Args:
        q_BHC: queries of the new tokens.
        k_BKC: their keys, written to the cache.
        v_BKC: their values, written to the cache.
        kv_blocks: the cache (2, P, S, K, C), keys then values, changed in place.
        batch: block tables and lengths.
        window: the number of last positions that a row attends to. None: all.

    Returns:
        (B, H, C) in the dtype of q.
    """
    n_rows, n_heads, head_dim = q_BHC.shape
    _, _, block_size, n_kv_heads, _ = kv_blocks.shape
    last_B = batch.lengths_B - 1
    slot_mapping_B = batch.table_TW[batch.slots_B, last_B // block_size].long() * block_size + last_B % block_size
    for part, new in zip(kv_blocks.flatten(1, 2), (k_BKC, v_BKC), strict=True):
        part.index_copy_(0, slot_mapping_B, new)
    width = batch.table_TW.shape[1] if batch.max_len is None else -(-batch.max_len // block_size)
    positions_L = torch.arange(width * block_size, device=q_BHC.device)
    mask_BL = positions_L < batch.lengths_B[:, None]
    if window is not None:
        mask_BL &= positions_L >= batch.lengths_B[:, None] - window
    # Unused columns of the table may name blocks of other rows, which may hold NaN. Read the last block instead.
    uses_BW = mask_BL.view(n_rows, width, block_size).any(-1)
    index = torch.where(uses_BW, batch.table_TW[batch.slots_B, :width], kv_blocks.shape[1] - 1).flatten()
    k_BKLC, v_BKLC = (
        part.index_select(0, index).view(n_rows, width * block_size, n_kv_heads, head_dim).transpose(1, 2)
        for part in kv_blocks
    )
    if batch.fixed_order:
        return padded_attention(q_BHC.unsqueeze(2), k_BKLC, v_BKLC, last_B.unsqueeze(1), window).squeeze(2)
    # Query heads that share a key head become query positions, so keys and values are not repeated.
    q_BKGC = q_BHC.reshape(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    mask_B11L = mask_BL[:, None, None]
    return F.scaled_dot_product_attention(q_BKGC, k_BKLC, v_BKLC, attn_mask=mask_B11L).reshape(
        n_rows, n_heads, head_dim
    )
