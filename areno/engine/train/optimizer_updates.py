"""The update rule of each optimizer: its moments, and how it changes slices of the master weights and parameters."""

from __future__ import annotations

import bisect
import zlib
from typing import ClassVar

import torch
from torch import Tensor

from areno.config.optimizers import MOMENT_BLOCK, OptimizerConfig, OptimizerType
from areno.engine.train.muon import orthogonalise_gradients
from areno.engine.train.optimizer_offload import Buffer, StateStream, UpdateWindow
from areno.engine.train.zero_buffers import FlatParameters, OwnedChunk
from areno.kernels.adam import AdamUpdate, adam, adam_8bit, adam_bf16
from areno.kernels.adam.reference import code_values
from areno.layers.parallel import ParallelGroup


class Sgd:
    """SGD without momentum, and the base class of the other updates.

    `moments` holds tensors with one element per owned parameter, and their scales, if any, with one element per block.
    They are allocated in the constructor, so that the size of the KV cache takes them into account.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, tp: ParallelGroup):
        self.flat = flat
        self.moments: dict[str, Buffer] = {name: flat.new_state(torch.float32, flat.n_local) for name in self.names}

    def clear(self) -> None:
        for buffer in self.moments.values():
            buffer.zero_()

    def prepare(self, stream: StateStream, how: AdamUpdate) -> None:
        """Change the gradients in place before the masters are updated. All ranks of the model call this together."""

    def apply(self, window: UpdateWindow, chunk: OwnedChunk, how: AdamUpdate) -> None:
        """Update the masters and parameters of a chunk. `how.decay` is that of the chunk's segment."""
        masters, grads, params = self._tensors(window, chunk)
        masters.mul_(how.decay).add_(grads, alpha=-how.lr * how.scale)
        if params.data_ptr() != masters.data_ptr():
            params.copy_(masters)

    def _tensors(self, window: UpdateWindow, chunk: OwnedChunk) -> tuple[Tensor, Tensor, Tensor]:
        return window.state("masters", chunk.local), self.flat.grads[chunk.grads], self.flat.weights(chunk.place)


class Adam(Sgd):
    names = "exp_avg", "exp_avg_sq"

    def apply(self, window: UpdateWindow, chunk: OwnedChunk, how: AdamUpdate) -> None:
        masters, grads, params = self._tensors(window, chunk)
        exp_avg, exp_avg_sq = (window.state(name, chunk.local) for name in self.names)
        adam(grads, masters, params, (exp_avg, exp_avg_sq), how)


class AdamBf16(Adam):
    """AdamW whose moments are bfloat16. An element rounds alike wherever it lies in the flat buffers."""

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, tp: ParallelGroup):
        self.flat = flat
        self.moments = {name: flat.new_state(torch.bfloat16) for name in self.names}
        self._places = sorted(
            (place.start, place.stop, zlib.crc32(name.encode())) for name, place in flat.ranges.items()
        )

    def apply(self, window: UpdateWindow, chunk: OwnedChunk, how: AdamUpdate) -> None:
        tensors = [*self._tensors(window, chunk), *(window.state(name, chunk.local) for name in self.names)]
        first = max(0, bisect.bisect_right(self._places, (chunk.place.start + 1,)) - 1)
        for start, stop, key in self._places[first:]:
            if start >= chunk.place.stop:
                break
            part = slice(max(start, chunk.place.start), min(stop, chunk.place.stop))
            if part.start < part.stop:
                inside = slice(part.start - chunk.place.start, part.stop - chunk.place.start)
                masters, grads, params, exp_avg, exp_avg_sq = (tensor[inside] for tensor in tensors)
                adam_bf16(grads, masters, params, (exp_avg, exp_avg_sq), how, key, part.start - start)


class Adam8Bit(Sgd):
    """AdamW whose moments are uint8 codes, with one scale for each block. No two parameters share a block."""

    names = "exp_avg", "exp_avg_sq"

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, tp: ParallelGroup):
        self.flat = flat
        assert all(place.start % MOMENT_BLOCK == 0 for place in flat.ranges.values())
        n_blocks = -(-flat.n_local // MOMENT_BLOCK)
        self.moments = {name: flat.new_state(torch.uint8, flat.n_local) for name in self.names}
        for name in self.names:
            self.moments[f"{name}_scale"] = flat.new_state(torch.float32, n_blocks, per_block=True)

    def clear(self) -> None:
        super().clear()
        # Padding between parameters must decode to zero for any scale of its block.
        self.moments["exp_avg"].fill_(code_values(True, torch.device("cpu")).tolist().index(0.0))

    def apply(self, window: UpdateWindow, chunk: OwnedChunk, how: AdamUpdate) -> None:
        masters, grads, params = self._tensors(window, chunk)
        exp_avg, exp_avg_sq = (window.state(name, chunk.local) for name in self.names)
        scale, scale_sq = (window.scales(f"{name}_scale", chunk.local) for name in self.names)
        adam_8bit(grads, masters, params, (exp_avg, exp_avg_sq), (scale, scale_sq), how)


class Muon(Adam):
    """Muon for the matrices of `flat.matrices`, whose momentum is `exp_avg`, and AdamW for all other parameters."""

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, tp: ParallelGroup):
        self.flat, self.settings, self.tp = flat, config.muon, tp
        self.moments = {"exp_avg": flat.new_state(torch.float32)}
        self.moments["exp_avg_sq"] = flat.new_state(torch.float32, flat.n_elementwise)

    def prepare(self, stream: StateStream, how: AdamUpdate) -> None:
        beta = self.settings.momentum
        for window in stream.windows({"exp_avg": self.moments["exp_avg"]}, self.flat.n_local):
            for chunk in self.flat.chunks(local=window.place):
                if chunk.segment.in_matrices:
                    grads, momentum = self.flat.grads[chunk.grads].mul_(how.scale), window.state("exp_avg", chunk.local)
                    momentum.lerp_(grads, 1.0 - beta)
                    if self.settings.nesterov:
                        grads.lerp_(momentum, beta)
                    else:
                        grads.copy_(momentum)
        orthogonalise_gradients(self.flat, self.tp, self.settings)

    def apply(self, window: UpdateWindow, chunk: OwnedChunk, how: AdamUpdate) -> None:
        if not chunk.segment.in_matrices:
            super().apply(window, chunk, how)
            return
        masters, directions, params = self._tensors(window, chunk)
        masters.mul_(how.decay).add_(directions, alpha=-how.lr)
        if params.data_ptr() != masters.data_ptr():
            params.copy_(masters)


UPDATES: dict[OptimizerType, type[Sgd]] = {
    "adam": Adam,
    "adam_bf16": AdamBf16,
    "adam_8bit": Adam8Bit,
    "muon": Muon,
    "sgd": Sgd,
}
