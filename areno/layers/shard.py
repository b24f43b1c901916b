"""Descriptions of where checkpoint tensors lie in this rank's parameters. Loading and saving use them.

A parameter may stack the rows of several checkpoint tensors, such as q, k and v. It holds only this rank's shard of
each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from areno.layers.parallel import ParallelGroup

GATHERED_BYTES = 2**26  # the most bytes that each rank sends at a time when a tensor is gathered
GATHERED_ON_CPU = 2**20  # the limit on the CPU, where received shards and the result share host memory


@dataclass(frozen=True)
class WeightSpec:
    """Dtype, device and tensor-parallel group with which the layers of a model create their weights on this rank."""

    dtype: torch.dtype
    device: torch.device | str
    tp: ParallelGroup = field(default_factory=ParallelGroup)
    placed: bool = True  # if False, parameters have no memory until `parameter.data = view` sets it

    def empty(self, *shape: int) -> nn.Parameter:
        if not self.placed:
            return nn.Parameter(torch.empty(1, dtype=self.dtype, device=self.device).expand(shape))
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


@dataclass(frozen=True)
class TensorPart:
    """Where one checkpoint tensor lies in a parameter of this rank, and which shard of the tensor this rank has.

    Attributes:
        full_shape: the shape of the checkpoint tensor.
        offset: the first row of the parameter that the checkpoint tensor fills.
        dim: the dimension that is divided over the tensor-parallel ranks, 0 or 1. None: every rank has all of it.
        start: the first index of this rank's shard along `dim`.
        size: the length of this rank's shard along `dim`. The last ranks may have less (a padded vocabulary).
        holder: for matrices of an expert, the only rank that has the tensor, and has it whole. `dim` is then 0, and
            `size` is 0 on the other ranks. None for other tensors.
        copies: the number of neighbouring ranks that have the same shard. Above 1 if there are fewer key-value heads
            than ranks.
        alternating: the number of matrices whose rows alternate in the tensor, such as 2 for gate and up of gpt-oss.
    """

    full_shape: tuple[int, ...]
    offset: int = 0
    dim: int | None = None
    start: int = 0
    size: int = 0
    holder: int | None = None
    copies: int = 1
    alternating: int = 1

    def shard_of(self, full: Any) -> Tensor:
        """Return this rank's shard of `full`, the checkpoint tensor or a safetensors slice of it."""
        if self.dim is None:
            return full[:]
        piece = slice(self.start, self.start + self.size)
        return full[piece] if self.dim == 0 else full[:, piece]

    def region(self, parameter: Tensor) -> Tensor:
        """Return a view of the rows of a parameter that hold this rank's shard."""
        rows = self.size if self.dim == 0 else self.full_shape[0]
        return parameter.detach()[self.offset : self.offset + rows]

    def gather(self, parameter: Tensor, tp: ParallelGroup, owner: int, out: Tensor | None) -> None:
        """Copy the full checkpoint tensor to `out` on the rank `owner`. `out` is None on the other ranks.

        All ranks must call this, unless `self.dim` is None. To limit additional memory, each rank sends at most
        GATHERED_BYTES at a time (GATHERED_ON_CPU on the CPU). A copy to pinned memory may still be in progress on
        return.
        """
        piece = self.region(parameter)
        if self.dim is None or tp.size == 1:
            if out is not None:
                out.copy_(piece, non_blocking=True)
            return
        total = self.full_shape[self.dim]
        share = total if self.holder is not None else -(-total * self.copies // tp.size)  # one rank's range along `dim`
        n_rows = share if self.dim == 0 else piece.shape[0]
        at_once = GATHERED_ON_CPU if piece.device.type == "cpu" else GATHERED_BYTES
        step = max(1, at_once // (piece.element_size() * math.prod(piece.shape[1:])))
        for row in range(0, n_rows, step):
            rows = piece[row : row + step]
            sent = piece.new_zeros(min(step, n_rows - row), *piece.shape[1:])  # the last rank may have fewer
            sent[: len(rows)].copy_(rows)
            received = tp.gather_to(sent, owner)
            if out is None:
                continue
            for rank, block in enumerate(received[:: self.copies]):
                if self.holder not in (None, rank):
                    continue
                if self.dim == 0:
                    first = 0 if self.holder is not None else rank * share
                    place = out[first + row :][: len(sent)]  # fewer at the end of a padded vocabulary
                else:
                    place = out[row : row + len(sent), rank * share : (rank + 1) * share]
                place.copy_(block[: len(place)], non_blocking=True)


def stacked_parts(
    shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], tp: ParallelGroup, copies: Sequence[int]
) -> tuple[TensorPart, ...]:
    """Describe checkpoint tensors that are stacked in one parameter. Each rank has a slice of the rows of each.

    `sizes`: for each tensor, the number of rows in a slice. `copies`: as in `TensorPart`.
    """
    offsets = itertools.accumulate(sizes[:-1], initial=0)
    return tuple(
        TensorPart(shape, offset=offset, dim=0, start=tp.rank // n * size, size=size, copies=n)
        for shape, offset, size, n in zip(shapes, offsets, sizes, copies, strict=True)
    )


Layout = dict[str, tuple[TensorPart, ...]]  # name of a parameter in its layer -> its parts, from the first row
