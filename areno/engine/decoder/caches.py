"""The memory of keys and values, in blocks, and the block tables.

The memory of layers with a recurrent state: one state for each slot.

Keeps the experts of each token that the decoder computes, beside its keys and values and in the same blocks.

So a prompt that samples share, a prefix that is found by its content, chunks of a prompt and a sequence that is
computed again need no thought: whoever has the keys of a token has its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.config.run import Layout
from areno.engine.decoder.block_manager import KVLayout
from areno.kernels.delta import DeltaStates, DeltaWeights, RowChunks, delta_rows, delta_step
from areno.layers.routing import Routing
from areno.models.cost import kv_heads
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
        n_heads, size = kv_heads(config, Layout.one_copy(model.tp.size)), layout.block_size
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


class StateCache:
    """What each layer remembers of the sequence in a slot, behind its last position that is computed.

    A state cannot be cut back to an earlier position, nor found by its content. So the samples of a prompt each get a
    copy of the state behind it, and a sequence that was preempted is computed from its first token.

    layers: the states of each layer that has some, n_slots of them. The last slot belongs to rows that pad a batch.
    """

    def __init__(self, model: Transformer, n_slots: int):
        delta, weight, tp = model.config.delta, model.embed.weight, model.tp
        assert delta is not None, "a model without recurrent states"
        n, on = len(delta.layers), weight.device
        heads = (tp.shard(delta.n_value_heads, "value heads"), delta.key_dim, delta.value_dim)
        # Zeros, because padding rows read theirs, and a nan would be kept for ever.
        inputs = torch.zeros(
            n, n_slots, tp.shard(delta.n_channels, "channels"), delta.width - 1, dtype=weight.dtype, device=on
        )
        matrices = torch.zeros(n, n_slots, *heads, dtype=torch.float32, device=on)
        self.layers = [DeltaStates(inputs[layer], matrices[layer]) for layer in range(n)]
        self._all = (inputs, matrices)

    def step(self, layer: int, proj_BP: Tensor, weights: DeltaWeights, slots_B: Tensor) -> Tensor:
        """One token of the sequences in these slots."""
        return delta_step(proj_BP, weights, self.layers[layer], slots_B)

    def rows(
        self,
        layer: int,
        proj_NP: Tensor,
        weights: DeltaWeights,
        chunks: RowChunks,
        slots_R: Tensor,
        goes_on_R: Tensor | None,
    ) -> Tensor:
        """Packed tokens of the sequences in these slots. goes_on_R: which have earlier tokens; None: none has."""
        states, before = self.layers[layer], None
        if goes_on_R is not None:
            given = [each.index_select(0, slots_R) for each in states]
            before = DeltaStates(*(_where(goes_on_R, each) for each in given))
        out_NI, after = delta_rows(proj_NP, weights, chunks, before, return_states=True)
        assert after is not None
        for mine, new in zip(states, after, strict=True):
            mine.index_copy_(0, slots_R, new)
        return out_NI

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give the target slots the states of the source slots, in all layers."""
        for each in self._all:
            each.index_copy_(1, targets, each.index_select(1, sources))


def _where(chosen_R: Tensor, x: Tensor) -> Tensor:
    """Zeros in the other rows, whatever they hold."""
    return torch.where(chosen_R.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


@dataclass(slots=True)
class PendingRoutes:
    """Routes on their way to the host."""

    routes: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> np.ndarray:
        """(n tokens, L layers, k experts)."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.routes.numpy()


class RouteCache:
    """routes: (n_blocks + 1, block_size, L, k); the last block is scratch, as of the KV cache."""

    def __init__(self, routing: Routing, n_blocks: int, block_size: int, device: torch.device):
        self._routing, self._block_size, self._device = routing, block_size, device
        shape = (n_blocks + 1, block_size, routing.n_layers, routing.experts.top_k)
        self.routes = torch.full(shape, routing.none, dtype=routing.dtype, device=device)

    def store(self, places_N: Tensor) -> None:
        """Keep what the last forward pass chose. places_N: block * block_size + offset of each of its tokens, int64."""
        recorded_NLk = self._routing.recorded()[: len(places_N)]  # without padding
        self.routes.flatten(0, 1).index_copy_(0, places_N, recorded_NLk)

    def places(self, table_TW: Tensor, slots_B: Tensor, positions_B: Tensor) -> Tensor:
        """Of the tokens at these positions of the sequences in these slots."""
        blocks_B = table_TW[slots_B, positions_B // self._block_size].long()
        return blocks_B * self._block_size + positions_B % self._block_size

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks."""
        self.routes.index_copy_(0, targets, self.routes.index_select(0, sources))

    def read(self, blocks: Any, n_tokens: int) -> PendingRoutes:
        """Begin to copy the routes of the first tokens of a sequence with these blocks to the host."""
        n_blocks = -(-n_tokens // self._block_size)
        chosen = torch.tensor(blocks[:n_blocks], dtype=torch.int64)
        if self._device.type != "cuda":
            return PendingRoutes(self.routes[chosen].flatten(0, 1)[:n_tokens], None)
        found = self.routes.index_select(0, chosen.pin_memory().to(self._device, non_blocking=True))
        found = found.flatten(0, 1)[:n_tokens]
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return PendingRoutes(host, ready)
