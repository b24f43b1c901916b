"""The memory of keys and values, in blocks, and the block tables."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.engine.decoder.kv.layout import KVLayout
from areno.models.cost.memory import kv_heads
from areno.models.transformer import Transformer


class KVCache:
    """The keys and values of all sequences, in the dtype of the model and on its device.

    kv_blocks: (Y layers of a block, 2, n_blocks + 1, block_size, K key heads, C head dim). The last block is scratch:
    rows that only pad a batch write there. n_blocks: of the pool; see KVLayout.

    tables: (T block tables, n_slots, W) int32, the blocks of each slot's sequence in each table. What lies behind the
    window of a table is what was there before, or the scratch block. n_slots: one for each sequence of the batch, and
    one for rows that only pad it. All of this memory stays where it is, so a CUDA graph may read it.
    """

    def __init__(self, model: Transformer, n_blocks: int, layout: KVLayout, n_slots: int):
        config, weight = model.config, model.output.weight
        n_heads, size = kv_heads(config, model.tp.size), layout.block_size
        shape = (layout.layers_per_block, 2, n_blocks + 1, size, n_heads, config.head_dim)
        # Zeros, because what lies beyond a row's length is read with weight 0, and 0 * nan is nan.
        self.kv_blocks = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.block_size, self.n_heads, self.n_blocks = size, n_heads, n_blocks
        self._flat = self.kv_blocks.flatten(2, 3)  # (Y, 2, (n_blocks + 1) * block_size, K, C)
        self._places = layout.places
        context_len = config.max_position_embeddings
        width = -(-min(context_len, layout.most_tokens(n_blocks, context_len)) // size)
        self.tables = torch.full((layout.n_tables, n_slots, width), n_blocks, dtype=torch.int32, device=weight.device)

    def table_of(self, layer: int) -> int:
        """Which block table a layer uses."""
        return self._places[layer][0]

    def blocks_of(self, layer: int) -> Tensor:
        """(2, n_blocks + 1, block_size, K, C): a layer's part of the blocks, of which some in its table are its own."""
        return self.kv_blocks[self._places[layer][1]]

    def flat_of(self, layer: int) -> Tensor:
        """The same as (2, (n_blocks + 1) * block_size, K, C)."""
        return self._flat[self._places[layer][1]]
