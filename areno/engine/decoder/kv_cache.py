"""The memory of keys and values, in blocks."""

from __future__ import annotations

import torch

from areno.models.cost import kv_heads
from areno.models.transformer import Transformer


class KVCache:
    """The keys and values of all sequences, in the dtype of the model and on its device.

    kv_blocks: (layers with attention, 2, n_blocks + 1, block_size, K key heads, C head dim). The last block is scratch:
    rows that only pad a batch write there.
    """

    def __init__(self, model: Transformer, n_blocks: int, block_size: int):
        config, weight = model.config, model.output.weight
        n_heads = kv_heads(config, model.tp.size)
        shape = (len(config.attention_layers), 2, n_blocks + 1, block_size, n_heads, config.head_dim)
        # Zeros, because what lies beyond a row's length is read with weight 0, and 0 * nan is nan.
        self.kv_blocks = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.block_size = block_size
        self.flat = self.kv_blocks.flatten(2, 3)  # (layers, 2, (n_blocks + 1) * block_size, K, C)
