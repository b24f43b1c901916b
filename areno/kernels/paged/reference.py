"""The inputs to the attention of a decoding step, and paged decode attention in plain torch.

The KV cache is divided into blocks. A block holds consecutive positions of one sequence, and a block table lists the
blocks of each sequence. Rows that sample the same prompt share its blocks. Up to GROUP_SIZE of these rows form a prefix
group, for which the shared blocks are read once.

T rows of the block table, of W block numbers each; G prefix groups of at most R rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from areno.kernels.fixed_order import padded_attention
from areno.kernels.paged.rows import as_bytes, dequantize_bytes, store_rows
from areno.kernels.sinks import sdpa_with_sinks

GROUP_SIZE = 8  # largest number of rows in a prefix group
_VECTOR = 16  # positions; the torch reference reads a multiple of them
_FIXED_ORDER_QUERIES = 16  # for each key head of a prefix group; with more, fewer programs fit on a multiprocessor


def max_group_rows(heads_per_key: int, fixed_order: bool) -> int:
    return min(GROUP_SIZE, max(2, _FIXED_ORDER_QUERIES // heads_per_key)) if fixed_order else GROUP_SIZE


@dataclass(slots=True)
class PagedBatch:
    """The block tables of a decoding step, and how its attention is cut into splits that run in parallel.

    A row's own positions, and those that it shares with its prefix group, are cut separately. Splits, `pdl` and
    `reads_early` change only the speed. With `fixed_order`, splits must be spans of `kernels.fixed_order`. Only the
    first split of a row or group may then cover several spans, and shared positions end where a span begins.

    With `pdl`, attention may begin before the previous kernel has ended (`kernels/jit.py`). Then neither that kernel
    nor another one that runs at the same time may write a tensor of this batch. With `reads_early`, attention may also
    read the cache early. All positions but the last of each row must then have been written before the chain of kernels
    with PDL began.

    Attributes:
        table_TW: int32. Position n of the sequence in table row t lies in block `table[t, n // S]` at offset `n % S`.
        slots_B: int64, index of each batch row's table row.
        lengths_B: int64, number of positions in each row, the last of which is the new token.
        shared_lens_B: int64, leading positions that a row shares with its prefix group. They fill whole blocks
            and are fewer than lengths_B. 0 for a row without a group.
        split_lens: int64 (2,), positions in a split of a row, and in a split of a group (in the first one if
            `fixed_order`).
        prefix_groups_GR: int64, batch rows of each group, padded with -1. A row is in at most one group.
        splits: largest number of splits of a row, and of a group.
        max_len: upper bound of lengths_B that the host knows, where the torch reference stops reading. The Triton
            kernels read lengths_B on the device, so a CUDA graph stays valid.
        cache_positions: window -> result of `_cache_positions`, which all layers with this window share.
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
    reads_early: bool = False
    max_len: int | None = None
    cache_positions: dict[int | None, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, init=False)

    def group_and_split_counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of groups, of rows in a group, of splits of a row and of splits of a group."""
        n_groups, n_rows = (0, 1) if self.prefix_groups_GR is None else self.prefix_groups_GR.shape
        return n_groups, n_rows, self.splits[0], self.splits[1] if n_groups else 0


def decode_attention(
    q_BHC: Tensor,
    k_BKC: Tensor,
    v_BKC: Tensor,
    kv_blocks: Tensor,
    batch: PagedBatch,
    window: int | None = None,
    exponents: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute one masked attention over all rows, whose keys and values are gathered from the cache."""
    n_rows, n_heads, head_dim = q_BHC.shape
    n_kv_heads = kv_blocks.shape[3]
    if window not in batch.cache_positions:  # the first layer with this window
        batch.cache_positions[window] = _cache_positions(batch, kv_blocks.shape[1] - 1, kv_blocks.shape[2], window)
    stored_B, read_N, mask_BL = batch.cache_positions[window]
    store_rows(k_BKC, v_BKC, kv_blocks, exponents, stored_B)
    unit = mask_BL.shape[1] * n_rows // len(read_N)
    units = as_bytes(kv_blocks).view(2, -1, unit * n_kv_heads * head_dim)
    k_BKLC, v_BKLC = units.index_select(1, read_N).view(2, n_rows, -1, n_kv_heads, head_dim).transpose(2, 3)
    if exponents is not None:
        of_units = exponents.unflatten(-1, (-1, unit))
        per_block = of_units.shape[3]
        k_scales, v_scales = (
            part[read_N // per_block, :, read_N % per_block].view(n_rows, -1, n_kv_heads, unit).transpose(1, 2)
            for part in of_units
        )
        k_BKLC = dequantize_bytes(k_BKLC, k_scales.flatten(2), q_BHC.dtype)
        v_BKLC = dequantize_bytes(v_BKLC, v_scales.flatten(2), q_BHC.dtype)
    if batch.fixed_order:
        last_B1 = (batch.lengths_B - 1).unsqueeze(1)
        return padded_attention(q_BHC.unsqueeze(2), k_BKLC, v_BKLC, last_B1, window, sinks_H).squeeze(2)
    # Query heads that share a key head become query positions, so keys and values are not repeated.
    q_BKGC = q_BHC.reshape(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    mask_B11L = mask_BL[:, None, None]
    if sinks_H is None:
        out_BKGC = F.scaled_dot_product_attention(q_BKGC, k_BKLC, v_BKLC, attn_mask=mask_B11L)
    else:
        out_BKGC = sdpa_with_sinks(q_BKGC, k_BKLC, v_BKLC, mask_B11L, sinks_H.view(n_kv_heads, -1))
    return out_BKGC.reshape(n_rows, n_heads, head_dim)


def _cache_positions(
    batch: PagedBatch, scratch: int, block_size: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions in the cache that a decoding step writes and reads.

    A position is block * S + offset. The first result is the position of each new token, int64. The second lists what
    the rows read, flattened, in units of several positions, because many small copies are slow. The third is a mask (B,
    L) bool of the positions in these units to which the row attends. Units without such a position are replaced by the
    block `scratch`, because the blocks of other rows may hold NaN.
    """
    last_B, table_BW = batch.lengths_B - 1, batch.table_TW[batch.slots_B]
    stored_B = table_BW.gather(1, (last_B // block_size)[:, None]).squeeze(1).long() * block_size + last_B % block_size
    width = table_BW.shape[1] if batch.max_len is None else -(-batch.max_len // block_size)
    n_read = width * block_size
    if batch.max_len is not None and not batch.fixed_order:  # a vector is filled, whatever the length of other rows
        n_read = min(n_read, -(-batch.max_len // _VECTOR) * _VECTOR)
    positions_L = torch.arange(n_read, device=last_B.device)
    mask_BL = positions_L < batch.lengths_B[:, None]
    if window is not None:
        mask_BL &= positions_L >= batch.lengths_B[:, None] - window
    unit = math.gcd(block_size, _VECTOR)
    per_block, starts_U = block_size // unit, positions_L[::unit]
    units_BU = table_BW[:, starts_U // block_size].long() * per_block + starts_U % block_size // unit
    is_read_BU = mask_BL.view(len(mask_BL), -1, unit).any(-1)
    read_BU = torch.where(is_read_BU, units_BU, scratch * per_block)
    return stored_B, read_BU.flatten(), mask_BL
