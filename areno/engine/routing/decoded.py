"""Keeps the experts of each token that the decoder computes, beside its keys and values and in the same blocks.

So a prompt that samples share, a prefix that is found by its content, chunks of a prompt and a sequence that is
computed again need no thought: whoever has the keys of a token has its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.layers.routing import Routing


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
