"""The keys and values of all sequences, in blocks, and how attention reaches them in prefill and in decode.

A slot mapping gives, for some tokens, their positions in the cache: block * block_size + offset. (The *slot* of a
sequence is another thing: its row in the device's tables while it is in the batch.)
Shape letters: N tokens of a prefill, M keys of its rows, B rows of a decode step, H query and K key heads, C head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areno.kernels.attention import varlen_attention
from areno.kernels.paged import PagedBatch, decode_attention
from areno.models.transformer import Transformer


class KVCache:
    """`kv_blocks`: (layers, 2, n_blocks + 1, block_size, K, C), in the dtype of the model and on its device.

    The last block is scratch: rows that only pad a batch write there.
    """

    def __init__(self, model: Transformer, n_blocks: int, block_size: int):
        config, weight = model.config, model.head_weight
        n_kv_heads = model.tp.shard(config.num_kv_heads, "num_key_value_heads")
        shape = (config.num_layers, 2, n_blocks + 1, block_size, n_kv_heads, config.head_dim)
        # Zeros, because what lies beyond a row's length is read with weight 0, and 0 * nan is nan.
        self.kv_blocks = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.block_size = block_size
        self.flat = self.kv_blocks.flatten(2, 3)  # (layers, 2, (n_blocks + 1) * block_size, K, C)


@dataclass(slots=True)
class PrefillAttend:
    """Attention of packed prompt chunks to themselves and to what their rows have in the cache.

    slot_mapping_N: int64, where the new tokens are stored. key_slot_mapping_M: int64, where all keys of each row are,
    old and new, row after row; None if no row has old ones. cu_seqlens_q, cu_seqlens_k: (rows + 1,) int32 borders of
    the rows in N and M.
    """

    cache: KVCache
    backend: str
    slot_mapping_N: Tensor
    key_slot_mapping_M: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int

    def __call__(self, layer: int, q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor) -> Tensor:
        keys, values = self.cache.flat[layer]
        # All rows write before any reads: a row may use blocks that another one fills in this very pass.
        keys.index_copy_(0, self.slot_mapping_N, k_NKC)
        values.index_copy_(0, self.slot_mapping_N, v_NKC)
        if self.key_slot_mapping_M is not None:
            k_NKC = keys.index_select(0, self.key_slot_mapping_M)
            v_NKC = values.index_select(0, self.key_slot_mapping_M)
        return varlen_attention(
            q_NHC, k_NKC, v_NKC, self.cu_seqlens_q, self.cu_seqlens_k, self.max_q, self.max_k, self.backend
        )


@dataclass(slots=True)
class DecodeAttend:
    """Attention of one new token per row, whose key and value are stored first."""

    cache: KVCache
    batch: PagedBatch

    def __call__(self, layer: int, q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor) -> Tensor:
        return decode_attention(q_BHC, k_BKC, v_BKC, self.cache.kv_blocks[layer], self.batch)
