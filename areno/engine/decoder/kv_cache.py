"""The keys and values of all sequences, in blocks, and the two ways a model reaches them: prefill and decode.

A "place" is a position in the cache counted in tokens: block * block_size + offset.
Shape letters: N tokens of a prefill, M keys of its rows, B rows of a decode step, H query and K key heads, C head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areno.kernels.attention import varlen_attention
from areno.kernels.paged import Batch, decode_attention
from areno.models.transformer import Transformer


class KVCache:
    """`pages`: (layers, 2, n_blocks + 1, block_size, K, C) in the type of the model, on its device.

    The last block is scratch: rows that only fill up a batch write there.
    """

    def __init__(self, model: Transformer, n_blocks: int, block_size: int):
        config, weight = model.config, model.head_weight
        n_kv_heads = model.tp.shard(config.num_kv_heads, "num_key_value_heads")
        shape = (config.num_layers, 2, n_blocks + 1, block_size, n_kv_heads, config.head_dim)
        # Zeros, because what lies beyond a row's length is read with weight 0, and 0 * nan is nan.
        self.pages = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.block_size = block_size
        self.scratch_block = n_blocks
        self._by_place = self.pages.flatten(2, 3)  # (layers, 2, places, K, C)

    def write(self, layer: int, places_N: Tensor, k_NKC: Tensor, v_NKC: Tensor) -> None:
        """Put the keys and values of some tokens at their places (int64)."""
        k_places, v_places = self._by_place[layer]
        k_places.index_copy_(0, places_N, k_NKC)
        v_places.index_copy_(0, places_N, v_NKC)

    def read(self, layer: int, places_M: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values at some places."""
        k_places, v_places = self._by_place[layer]
        return k_places.index_select(0, places_M), v_places.index_select(0, places_M)

    def copy_blocks(self, pairs_2N: Tensor) -> None:
        """Copy whole blocks, in all layers: pairs_2N holds the sources, then the destinations (int64)."""
        self.pages.index_copy_(2, pairs_2N[1], self.pages.index_select(2, pairs_2N[0]))


@dataclass(slots=True)
class PrefillAttend:
    """Attention of prompt pieces, packed end to end, to themselves and to what their rows have in the cache.

    places_N: where the new tokens go. key_places_M: the places of all keys of each row, old and new, row after row;
    None where no row has old ones. cu_seqlens_q, cu_seqlens_k: (rows + 1,) int32 borders of the rows among N and M.
    """

    cache: KVCache
    backend: str
    places_N: Tensor
    key_places_M: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int

    def __call__(self, layer: int, q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor) -> Tensor:
        # All rows write before any reads: a row may use blocks that another one fills in this very pass.
        self.cache.write(layer, self.places_N, k_NKC, v_NKC)
        if self.key_places_M is not None:
            k_NKC, v_NKC = self.cache.read(layer, self.key_places_M)
        return varlen_attention(
            q_NHC, k_NKC, v_NKC, self.cu_seqlens_q, self.cu_seqlens_k, self.max_q, self.max_k, self.backend
        )


@dataclass(slots=True)
class DecodeAttend:
    """Attention of one new token for each row, whose key and value go into the cache."""

    cache: KVCache
    batch: Batch

    def __call__(self, layer: int, q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor) -> Tensor:
        return decode_attention(q_BHC, k_BKC, v_BKC, self.cache.pages[layer], self.batch)
