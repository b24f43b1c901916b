"""Where a checkpoint tensor lives inside a parameter: what each layer declares, and loading and saving follow.

A parameter may hold several checkpoint tensors one below the other (fused q, k, v) and only this rank's piece of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from areno.layers.parallel import ParallelGroup


@dataclass(frozen=True)
class WeightSpec:
    """How every layer of a model makes its weights on this rank. tp: the ranks that share one copy of the model."""

    dtype: torch.dtype
    device: torch.device | str
    tp: ParallelGroup = field(default_factory=ParallelGroup)

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter with uninitialised values."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor's place inside a parameter.

    full_shape: of the checkpoint tensor. offset: first row of the parameter that it fills.
    dim: dimension that is divided over the tensor-parallel ranks, None where every rank holds all of it.
    start, size: this rank's range along `dim`; `size` may be smaller on the last ranks (a padded vocabulary).
    """

    full_shape: tuple[int, ...]
    offset: int = 0
    dim: int | None = None
    start: int = 0
    size: int = 0

    def cut(self, full: Any) -> Tensor:
        """This rank's piece of the checkpoint tensor; `full` is a tensor or a safetensors slice."""
        if self.dim is None:
            return full[:]
        piece = slice(self.start, self.start + self.size)
        return full[piece] if self.dim == 0 else full[:, piece]

    def region(self, parameter: Tensor) -> Tensor:
        """The view of `parameter` that holds this rank's piece."""
        rows = self.size if self.dim == 0 else self.full_shape[0]
        return parameter.detach()[self.offset : self.offset + rows]

    def gather(self, parameter: Tensor, tp: ParallelGroup) -> Tensor:
        """The full checkpoint tensor, on every rank. A collective call when `dim` is not None."""
        piece = self.region(parameter)
        if self.dim is None or tp.size == 1:
            return piece
        total, padded_shape = self.full_shape[self.dim], list(self.full_shape)
        padded_shape[self.dim] = -(-total // tp.size)
        padded = piece.new_zeros(padded_shape)
        padded.narrow(self.dim, 0, piece.shape[self.dim]).copy_(piece)
        return tp.gather(padded, self.dim).narrow(self.dim, 0, total)


Layout = dict[str, tuple[Part, ...]]  # parameter name inside its layer -> its parts, from the first row down
