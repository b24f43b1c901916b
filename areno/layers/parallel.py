"""A process group and its collectives, for tensor, sequence, context and data parallelism.

In a group of one rank, every collective returns its input, so model files need not check the number of devices. All
ranks make the same calls, with tensors of the same shape and dtype. A method that returns a handle has only started:
pass the handle to `wait_for` before reading the result. On CUDA, this blocks the current stream, not the host.

Shape letters: n rows (or tokens) of one rank, N = n * size rows of all ranks, in the order of the ranks.
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

# Newer releases of torch rename these functions, and warn about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


@dataclass(frozen=True)
class ParallelGroup:
    """This process's rank in a process group, the group's size, and its collectives.

    The ranks of a tensor-parallel group hold shards of one model replica, whose layers call `copy_in` and `reduce_out`.
    The ranks of a data-parallel group hold the same shard in different replicas.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    in_order: bool = False  # `all_reduce` sums in the order of the ranks, wherever an element is in its tensor
    symmetric_memory: SymmetricMemory | None = None  # faster collectives for small tensors on GPUs

    @property
    def sum_backend(self) -> str:
        """The name of the backend that sums small tensors in decoding, for log lines. Empty in a group of one rank."""
        if self.size == 1:
            return ""
        return "shared memory" if self.symmetric_memory is not None else dist.get_backend(self.group)

    def shard_size(self, total: int, what: str) -> int:
        """Return total / size. Raises ValueError, which names `what`, if the division leaves a remainder."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) is not divisible by the {self.size} ranks of the group")
        return total // self.size

    def all_reduce(self, x: Tensor, op: Any = None) -> Tensor:
        """Reduce x in place with `op` (None: sum), outside autograd."""
        if self.size > 2 and self.in_order and op is None:
            first, *others = self._all_shards(x)
            x.copy_(functools.reduce(torch.Tensor.add_, others, first))
        elif self.size > 1:  # the sum of two numbers has only one order
            dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=self.group)
        return x

    def reduce_scatter(self, x: Tensor) -> Any:
        """Start to sum x in place, into the n elements of this rank. The rest becomes undefined. Return a handle."""
        if self.size == 1:
            return _CompletedWork()
        return _reduce_scatter(self.own_rows(x), x, group=self.group, async_op=True)  # type: ignore[misc]

    def all_gather(self, x: Tensor) -> Any:
        """Start to fill x in place: each rank contributes the n elements that it owns. Return a handle."""
        if self.size == 1:
            return _CompletedWork()
        return _all_gather(x, self.own_rows(x), group=self.group, async_op=True)  # type: ignore[misc]

    def gather_from_replicas(self, x: Tensor, n: int) -> Tensor:
        """Gather x from the `n` neighbouring ranks that hold copies of the same weights, (n, x.numel()).

        All ranks of the group call this together. Different sets of `n` ranks may have x of different lengths.
        """
        counts = [x.numel() if rank // n == self.rank // n else 0 for rank in range(self.size)]
        out = x.new_empty((n, x.numel()))
        dist.all_to_all_single(out.view(-1), x.repeat(n), counts, counts, group=self.group)
        return out

    def sum_over_replicas(self, x: Tensor, n: int) -> None:
        """Sum x in place over the ranks of `gather_from_replicas`. The result is bit-identical on all of them."""
        if n == self.size:
            self.all_reduce(x)
        elif n > 1:
            x.copy_(self.gather_from_replicas(x, n).sum(0))

    def copy_in(self, x: Tensor) -> Tensor:
        """Return x. The backward pass sums the gradients over the ranks. Used before a column-parallel layer."""
        if self.size == 1:
            return x
        return _Exchange.apply(x, lambda x: x.view_as(x), lambda grad: self.all_reduce(grad.contiguous().clone()))  # type: ignore[return-value]

    def reduce_out(self, x: Tensor) -> Tensor:
        """Return the sum of x (maybe in place). The backward pass is the identity. Used after a row-parallel layer."""
        if self.size == 1:
            return x
        if (
            self.symmetric_memory is not None
            and not torch.is_grad_enabled()
            and self.symmetric_memory.can_all_reduce(x)
        ):
            return self.symmetric_memory.all_reduce(x)
        return _ReduceOut.apply(x, self)  # type: ignore[return-value]

    # Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198): between the products of a layer each rank has n
    # consecutive tokens. A reduce-scatter and an all-gather together move as many bytes as an all-reduce.

    def gather_rows(self, x: Tensor) -> Tensor:
        """Concatenate the rows of all ranks. The backward pass sums the gradients and returns this rank's rows.

        Replaces `copy_in` under sequence parallelism.
        """
        return x if self.size == 1 else _Exchange.apply(x, self.all_gather_rows, self.reduce_scatter_rows)  # type: ignore[return-value]

    def scatter_rows(self, x: Tensor) -> Tensor:
        """Sum x over the ranks and return this rank's rows. The backward pass gathers the gradients of all ranks' rows.

        Replaces `reduce_out` under sequence parallelism.
        """
        return x if self.size == 1 else _Exchange.apply(x, self.reduce_scatter_rows, self.all_gather_rows)  # type: ignore[return-value]

    def gather_rows_equal(self, x: Tensor) -> Tensor:
        """Do `gather_rows`, without a sum of gradients. The result's gradient must be equal on all ranks."""
        return x if self.size == 1 else _Exchange.apply(x, self.all_gather_rows, self.own_rows)  # type: ignore[return-value]

    def all_gather_rows(self, x: Tensor) -> Tensor:
        out, work = self.begin_all_gather_rows(x)
        wait_for(work)
        return out

    def begin_all_gather_rows(self, x: Tensor) -> tuple[Tensor, Any]:
        """Start `all_gather_rows`. Return its unfinished result and a handle."""
        if self.size == 1:
            return x, _CompletedWork()
        out = x.new_empty((self.size * len(x), *x.shape[1:]))
        return out, _all_gather(out, x.contiguous(), group=self.group, async_op=True)  # type: ignore[misc]

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """Sum x over the ranks and return this rank's rows of the sum, outside autograd."""
        if self.size == 1:
            return x
        out = x.new_empty((len(x) // self.size, *x.shape[1:]))
        _reduce_scatter(out, x.contiguous(), group=self.group)  # type: ignore[misc]
        return out

    def own_rows(self, x: Tensor) -> Tensor:
        """Return a view of this rank's rows of x, without communication."""
        n = len(x) // self.size
        return x[self.rank * n : (self.rank + 1) * n]

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the tensors of all ranks along a dimension, outside autograd."""
        if self.size == 1:
            return x
        return torch.cat(self._all_shards(x), dim=dim)

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        """Stack the tensors of all ranks, (size, *x.shape), outside autograd."""
        if self.size > 1 and self.symmetric_memory is not None and self.symmetric_memory.can_gather(x):
            return self.symmetric_memory.all_gather(x)
        return torch.stack(self._all_shards(x)) if self.size > 1 else x.unsqueeze(0)

    def _all_shards(self, x: Tensor) -> list[Tensor]:
        pieces = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(pieces, x.contiguous(), group=self.group)
        return pieces

    def columns_to_rows(self, x: Tensor) -> Tensor:
        """Do an all-to-all from some columns of all rows (N, V, ...) to all columns of some rows (n, size * V, ...)."""
        return x if self.size == 1 else _Exchange.apply(x, self._columns_to_rows, self._rows_to_columns)  # type: ignore[return-value]

    def rows_to_columns(self, x: Tensor) -> Tensor:
        """Do the inverse of `columns_to_rows`: (n, V, ...) -> (N, V / size, ...)."""
        return x if self.size == 1 else _Exchange.apply(x, self._rows_to_columns, self._columns_to_rows)  # type: ignore[return-value]

    def _columns_to_rows(self, x: Tensor) -> Tensor:
        pieces = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(pieces, x.contiguous(), group=self.group)
        return pieces.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def _rows_to_columns(self, x: Tensor) -> Tensor:
        pieces = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        out = torch.empty_like(pieces)
        dist.all_to_all_single(out, pieces, group=self.group)
        return out

    def gather_to(self, x: Tensor, rank: int) -> list[Tensor]:
        """Return the tensors of all ranks on the rank `rank`, and an empty list on the others."""
        if self.size == 1:
            return [x]
        pieces = [torch.empty_like(x) for _ in range(self.size)] if self.rank == rank else []
        dist.gather(x.contiguous(), pieces or None, group=self.group, group_dst=rank)
        return pieces


class _CompletedWork:
    """The handle of a collective in a group of one rank, where there is nothing to wait for."""

    def wait(self) -> None: ...


def wait_for(work: Any) -> None:
    """Wait for an asynchronous collective. If it hangs, the process's stack trace shows this function's name."""
    work.wait()


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.mark_dirty(x)
        return tp.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Exchange(torch.autograd.Function):
    """Applies one function in the forward pass, and another one to the gradient in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.inverse = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.inverse(grads[0]), None, None
