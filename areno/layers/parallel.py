"""A group of processes that work together, and its collectives.

In a group of one, every collective returns its input. So a model file never asks how many devices there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areno.kernels.symmetric_memory import SymmetricMemory

# Newer releases of torch have the same operations under other names, and warn of these.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


@dataclass(frozen=True)
class ParallelGroup:
    """This process's rank in a group, the group's size, and its collectives.

    It serves both kinds of parallelism. The ranks of a tensor-parallel group hold the shards of one copy of the model.
    The ranks of a data-parallel group hold the same shard of different copies. `copy_in` and `reduce_out` are for the
    layers of a tensor-parallel group.
    """

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed process group; None when size is 1
    in_order: bool = False  # sum by rank, so that a number does not depend on its place in a tensor
    symmetric_memory: SymmetricMemory | None = None  # for small tensors on GPUs

    @property
    def sums_by(self) -> str:
        """What adds up the small tensors of decoding; "" in a group of one."""
        if self.size == 1:
            return ""
        return "shared memory" if self.symmetric_memory is not None else dist.get_backend(self.group)

    def shard(self, total: int, what: str) -> int:
        """`total` divided by the ranks. ValueError, which calls it `what`, where they do not divide it."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) is not divisible by the {self.size} ranks of the group")
        return total // self.size

    def all_reduce(self, x: Tensor, op: Any = None) -> Tensor:
        """Sum x over the ranks (or reduce it by the ReduceOp `op`), in place and outside autograd. Returns x."""
        if self.size > 2 and self.in_order and op is None:
            first, *others = self._pieces(x)
            x.copy_(functools.reduce(torch.Tensor.add_, others, first))
        elif self.size > 1:  # of two numbers, the sum has one order
            dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=self.group)
        return x

    def reduce_scatter(self, x: Tensor) -> Any:
        """Begin to sum x (n * size,) over the ranks, each into its own n elements of x; the others lose their content.

        Call wait() of what is returned before they are read. On CUDA that makes the current stream wait, not the host.
        """
        if self.size == 1:
            return _Done()
        return _reduce_scatter(self._own(x), x, group=self.group, async_op=True)  # type: ignore[misc]

    def all_gather(self, x: Tensor) -> Any:
        """Begin to fill x (n * size,) from each rank's own n elements of it; wait as for `reduce_scatter`."""
        if self.size == 1:
            return _Done()
        return _all_gather(x, self._own(x), group=self.group, async_op=True)  # type: ignore[misc]

    def _own(self, x: Tensor) -> Tensor:
        n = x.numel() // self.size
        return x[self.rank * n : (self.rank + 1) * n]

    def of_copies(self, x: Tensor, n: int) -> Tensor:
        """(n, x.numel()): x (any,) of each of the `n` ranks that follow each other and hold copies of something."""
        counts = [x.numel() if rank // n == self.rank // n else 0 for rank in range(self.size)]
        out = x.new_empty((n, x.numel()))
        dist.all_to_all_single(out.view(-1), x.repeat(n), counts, counts, group=self.group)
        return out

    def sum_copies(self, x: Tensor, n: int) -> None:
        """Sum x (any,) over these ranks, in place. All of them get the same bits."""
        if n == self.size:
            self.all_reduce(x)
        elif n > 1:
            x.copy_(self.of_copies(x, n).sum(0))

    def copy_in(self, x: Tensor) -> Tensor:
        """Identity in the forward pass, sum of the gradients in the backward pass: before a column-parallel layer."""
        return x if self.size == 1 else _CopyIn.apply(x, self)  # type: ignore[return-value]

    def reduce_out(self, x: Tensor) -> Tensor:
        """Sum in the forward pass, perhaps in place, and identity in the backward pass: after a row-parallel layer."""
        if self.size == 1:
            return x
        if self.symmetric_memory is not None and not torch.is_grad_enabled() and self.symmetric_memory.can_sum(x):
            return self.symmetric_memory.all_reduce(x)
        return _ReduceOut.apply(x, self)  # type: ignore[return-value]

    # Sequence parallel (Korthikanti et al. 2022, arXiv 2205.05198): between the products of a layer each rank has a
    # share of the tokens, which follow each other. A reduce-scatter and an all-gather move what an all-reduce does.

    def join(self, x: Tensor) -> Tensor:
        """(n, ...) of each rank to (size n, ...); gradients are summed. `copy_in` for shares of the tokens."""
        return x if self.size == 1 else _Trade.apply(x, self.joined, self.summed)  # type: ignore[return-value]

    def sum_out(self, x: Tensor) -> Tensor:
        """The sum of x (size n, ...) over the ranks, of which each gets (n, ...). `reduce_out` for such shares."""
        return x if self.size == 1 else _Trade.apply(x, self.summed, self.joined)  # type: ignore[return-value]

    def join_equal(self, x: Tensor) -> Tensor:
        """As `join`, where all ranks find the same gradient, which is therefore not summed."""
        return x if self.size == 1 else _Trade.apply(x, self.joined, self.rows)  # type: ignore[return-value]

    def joined(self, x: Tensor) -> Tensor:
        """`join` outside autograd."""
        out, work = self.begin_join(x)
        wait_for(work)
        return out

    def begin_join(self, x: Tensor) -> tuple[Tensor, Any]:
        """What `joined` returns, and what to `wait_for` before it is read."""
        if self.size == 1:
            return x, _Done()
        out = x.new_empty((self.size * len(x), *x.shape[1:]))
        return out, _all_gather(out, x.contiguous(), group=self.group, async_op=True)  # type: ignore[misc]

    def summed(self, x: Tensor) -> Tensor:
        """`sum_out` outside autograd."""
        if self.size == 1:
            return x
        out = x.new_empty((len(x) // self.size, *x.shape[1:]))
        _reduce_scatter(out, x.contiguous(), group=self.group)  # type: ignore[misc]
        return out

    def rows(self, x: Tensor) -> Tensor:
        """This rank's share (n, ...) of x (size n, ...)."""
        n = len(x) // self.size
        return x[self.rank * n : (self.rank + 1) * n]

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' pieces, which have one shape, along a dimension, outside autograd."""
        if self.size == 1:
            return x
        return torch.cat(self._pieces(x), dim=dim)

    def every(self, x: Tensor) -> Tensor:
        """(size, *x.shape): x of each rank, outside autograd."""
        if self.size > 1 and self.symmetric_memory is not None and self.symmetric_memory.can_gather(x):
            return self.symmetric_memory.all_gather(x)
        return torch.stack(self._pieces(x)) if self.size > 1 else x.unsqueeze(0)

    def _pieces(self, x: Tensor) -> list[Tensor]:
        pieces = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(pieces, x.contiguous(), group=self.group)
        return pieces

    def to_rows(self, x: Tensor) -> Tensor:
        """(N, V, ...), the rank's columns of N rows, to (N / size, size V, ...), all columns of its share of the rows.

        The ranks' shares follow each other and have to divide N; so do the ranks' columns. Differentiable.
        """
        return x if self.size == 1 else _Trade.apply(x, self._to_rows, self._to_columns)  # type: ignore[return-value]

    def to_columns(self, x: Tensor) -> Tensor:
        """(N, V, ...), the rank's share of the rows, to (size N, V / size, ...), its columns of all rows.

        The way back from `to_rows`.
        """
        return x if self.size == 1 else _Trade.apply(x, self._to_columns, self._to_rows)  # type: ignore[return-value]

    def _to_rows(self, x: Tensor) -> Tensor:
        pieces = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(pieces, x.contiguous(), group=self.group)
        return pieces.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def _to_columns(self, x: Tensor) -> Tensor:
        pieces = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        out = torch.empty_like(pieces)
        dist.all_to_all_single(out, pieces, group=self.group)
        return out

    def gather_to(self, x: Tensor, rank: int) -> list[Tensor]:
        """The ranks' pieces, which have one shape, on one rank; an empty list on the others."""
        if self.size == 1:
            return [x]
        pieces = [torch.empty_like(x) for _ in range(self.size)] if self.rank == rank else []
        dist.gather(x.contiguous(), pieces or None, group=self.group, group_dst=rank)
        return pieces


class _Done:
    """The work of a group of one."""

    def wait(self) -> None:
        pass


def wait_for(work: Any) -> None:
    """Until a collective that was begun is done. The stacks of a hang show this function."""
    work.wait()


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(grads[0].contiguous().clone()), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.mark_dirty(x)
        return tp.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Trade(torch.autograd.Function):
    """x by one exchange in the forward pass, and its gradient by the other, which leads back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None
