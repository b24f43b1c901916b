"""Where a checkpoint tensor lives inside a parameter: what each layer declares, and loading and saving follow.

A parameter may hold several checkpoint tensors one below the other (fused q, k, v) and only this rank's piece of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from areno.layers.parallel import ParallelGroup

GATHERED_BYTES = 2**26  # that each rank sends at once when a tensor is gathered
GATHERED_ON_CPU = 2**20  # the same, where what is received takes host memory, beside the tensor that is put together


@dataclass(frozen=True)
class WeightSpec:
    """How every layer of a model makes its weights on this rank.

    tp: the ranks that share one copy of the model. placed: False where a parameter has a shape and no memory until
    somebody gives it some (`parameter.data = view`).
    """

    dtype: torch.dtype
    device: torch.device | str
    tp: ParallelGroup = field(default_factory=ParallelGroup)
    placed: bool = True

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter with uninitialised values."""
        if not self.placed:
            return nn.Parameter(torch.empty(1, dtype=self.dtype, device=self.device).expand(shape))
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor's place inside a parameter.

    full_shape: of the checkpoint tensor. offset: first row of the parameter that it fills.
    dim: dimension that is divided over the tensor-parallel ranks, None where every rank holds all of it.
    start, size: this rank's range along `dim`; `size` may be smaller on the last ranks (a padded vocabulary).
    holder: the rank that has all of it, `dim` being 0 and `size` 0 on the others; None where `dim` is really divided.
    copies: so many ranks that follow each other hold the same range (key-value heads that are fewer than the ranks).
    """

    full_shape: tuple[int, ...]
    offset: int = 0
    dim: int | None = None
    start: int = 0
    size: int = 0
    holder: int | None = None
    copies: int = 1

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

    def gather(self, parameter: Tensor, tp: ParallelGroup, owner: int, out: Tensor | None) -> None:
        """Copy the full checkpoint tensor to `out` on the rank `owner`; the other ranks pass None.

        A collective call where `dim` is not None, which sends GATHERED_BYTES at a time: no device holds more of each
        rank beside its own piece. A copy to pinned memory is under way when this returns.
        """
        piece = self.region(parameter)
        if self.dim is None or tp.size == 1:
            if out is not None:
                out.copy_(piece, non_blocking=True)
            return
        total = self.full_shape[self.dim]
        share = total if self.holder is not None else -(-total * self.copies // tp.size)  # of a rank along `dim`
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


Layout = dict[str, tuple[Part, ...]]  # parameter name inside its layer -> its parts, from the first row down
