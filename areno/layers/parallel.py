"""Tensor parallelism as the layers see it: a rank, a size, and four collectives with the right gradients.

With size 1 every function returns its input, so a model file never asks how many devices there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the devices that share one copy of the model."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed process group; None when size is 1

    def shard(self, total: int, what: str) -> int:
        """`total` split evenly over the ranks; `what` names the dimension in the error."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) is not divisible by engine.tp_size={self.size}")
        return total // self.size

    def all_reduce(self, x: Tensor, op: Any = None) -> Tensor:
        """Sum (or `op`) over the ranks, in place, outside autograd."""
        if self.size > 1:
            dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=self.group)
        return x

    def copy_in(self, x: Tensor) -> Tensor:
        """Identity forward, sum of gradients backward: before a column-parallel layer."""
        return x if self.size == 1 else _CopyIn.apply(x, self)  # type: ignore[return-value]

    def reduce_out(self, x: Tensor) -> Tensor:
        """Sum forward, identity backward: after a row-parallel layer."""
        return x if self.size == 1 else _ReduceOut.apply(x, self)  # type: ignore[return-value]

    def gather_last(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' pieces along the last dimension, outside autograd."""
        if self.size == 1:
            return x
        pieces = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(pieces, x.contiguous(), group=self.group)
        return torch.cat(pieces, dim=-1)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(grads[0].contiguous().clone()), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return tp.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
