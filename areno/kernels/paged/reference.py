"""Where the rows of a decode step have their keys and values, and paged decode attention in plain torch.

The KV cache is divided into blocks. A block holds consecutive positions of one sequence; a block table lists the blocks
of each sequence. Rows that sample the same prompt share its blocks; up to GROUP_SIZE of them form a prefix group, for
which these blocks are read once.

Shape letters: B rows, H query heads, K key heads (H is a multiple of K), C head dimension; P blocks of S positions;
T rows of the block table, of W block numbers each; G prefix groups of at most R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areno.kernels.spans import by_spans

GROUP_SIZE = 8  # rows of a prefix group
_SPAN_QUERIES = 16  # of one key head in a prefix group by spans; with more, fewer programs have room side by side


def most_rows(heads_per_key: int, by_spans: bool) -> int:
    """Of a prefix group, where each key head has so many query heads."""
    return min(GROUP_SIZE, max(2, _SPAN_QUERIES // heads_per_key)) if by_spans else GROUP_SIZE


@dataclass(slots=True)
class PagedBatch:
    """The block tables of a decode step, and how its attention is divided into pieces that run side by side.

    table_TW: int32. Position n of the sequence in table row t lies in block `table[t, n // S]` at offset `n % S`.
    slots_B: int64, the table row of each batch row. lengths_B: int64, positions of each row, at least 1; the last one
    is that of the new token.

    shared_lens_B: int64, how many of its first positions a row shares with the others of its prefix group: whole
    blocks, fewer than its length; 0 for a row in no group. prefix_groups_GR: int64, the batch rows of each group, with
    -1 after the last; an unused group is all -1. A row is in one group at most. None: no groups.

    spans: int64 (2,), how many positions one piece has: of a row's own, and of those that a group shares.
    splits: the most pieces that a row's own positions, and a group's shared ones, make. Spans and splits change the
    speed, not the result.

    by_spans: a row has the very result of `varlen_attention` with the backend "spans". Pieces are then the spans of
    `kernels.spans`, shared_lens_B is where a span begins, and spans[1] how many positions, from the first on, a group
    has in one piece: whole spans.

    early: kernels may look at the batch while the one in front of attention still runs (`kernels/jit.py`), so neither
    that one nor one that may run beside it makes any of it. In a decode step, products lie between. This changes the
    speed, not the result.

    max_len: a bound on lengths_B known on the host, so that the torch reference need not read whole table rows. The
    Triton kernel stops at each row's own length and does not use it, so a captured graph holds no number of one step.
    """

    table_TW: Tensor
    slots_B: Tensor
    lengths_B: Tensor
    shared_lens_B: Tensor
    spans: Tensor
    prefix_groups_GR: Tensor | None = None
    splits: tuple[int, int] = (1, 1)
    by_spans: bool = False
    early: bool = False
    max_len: int | None = None


def decode_attention(
    q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor, kv_blocks: Tensor, batch: PagedBatch, window: int | None = None
) -> Tensor:
    """As `areno.kernels.paged.decode_attention`.

    Gathers every row's blocks up to `max_len`, then runs one masked attention over the batch.
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
    # Columns that a row does not use may name blocks of others, whose numbers need not be finite: take the last one.
    uses_BW = mask_BL.view(n_rows, width, block_size).any(-1)
    index = torch.where(uses_BW, batch.table_TW[batch.slots_B, :width], kv_blocks.shape[1] - 1).flatten()
    k_BKLC, v_BKLC = (
        part.index_select(0, index).view(n_rows, width * block_size, n_kv_heads, head_dim).transpose(1, 2)
        for part in kv_blocks
    )
    if batch.by_spans:
        return by_spans(q_BHC.unsqueeze(2), k_BKLC, v_BKLC, last_B.unsqueeze(1), window).squeeze(2)
    # The query heads that share a key head take the place of query positions, so keys and values are not repeated.
    q_BKGC = q_BHC.reshape(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    mask_B11L = mask_BL[:, None, None]
    return F.scaled_dot_product_attention(q_BKGC, k_BKLC, v_BKLC, attn_mask=mask_B11L).reshape(
        n_rows, n_heads, head_dim
    )
