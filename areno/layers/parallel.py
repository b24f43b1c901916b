"""A group of processes and its collectives, for tensor, sequence, context and data parallelism.

In a group of one, every collective returns its input, so model files need not ask for the number of devices.
Shape letters: n rows (or tokens) of one rank, N = n * size rows of all ranks.
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
    """This process's rank in a group, the group's size, and its collectives.

    The ranks of a tensor-parallel group hold shards of one copy of the model; `copy_in` and `reduce_out` are for its
    layers. The ranks of a data-parallel group hold the same shard of different copies.

    Attributes:
        rank: this process's rank in the group.
        size: the number of ranks.
        group: the torch.distributed process group. None for a group of one.
        in_order: sum in the order of the ranks, so that a sum does not depend on its place in a tensor.
        symmetric_memory: collectives of small tensors on GPUs. None: the process group does them.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    in_order: bool = False
    symmetric_memory: SymmetricMemory | None = None

    @property
    def sum_backend(self) -> str:
        """The backend that sums small tensors while decoding, for messages; "" in a group of one."""
        if self.size == 1:
            return ""
        return "shared memory" if self.symmetric_memory is not None else dist.get_backend(self.group)

    def shard(self, total: int, what: str) -> int:
        """Divide a number by the ranks.

        Args:
            total: the number.
            what: its name, for the message.

        Returns:
            The share of one rank.

        Raises:
            ValueError: the ranks do not divide the number.
        """
        if total % self.size:
            raise ValueError(f"{what} ({total}) is not divisible by the {self.size} ranks of the group")
        return total // self.size

    def all_reduce(self, x: Tensor, op: Any = None) -> Tensor:
        """Reduce x over the ranks, in place and outside autograd.

        Args:
            x: a tensor of one shape on all ranks.
            op: the ReduceOp. None: sum.

        Returns:
            x.
        """
        if self.size > 2 and self.in_order and op is None:
            first, *others = self._pieces(x)
            x.copy_(functools.reduce(torch.Tensor.add_, others, first))
        elif self.size > 1:  # the sum of two numbers has only one order
            dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=self.group)
        return x

    def reduce_scatter(self, x: Tensor) -> Any:
        """Begin to sum x over the ranks, each rank into its own n elements of x. The other elements become undefined.

        Args:
            x: (N,), changed in place.

        Returns:
            A handle; call its wait() before reading x. On CUDA, wait() blocks the current stream, not the host.
        """
        if self.size == 1:
            return _Done()
        return _reduce_scatter(self._own(x), x, group=self.group, async_op=True)  # type: ignore[misc]

    def all_gather(self, x: Tensor) -> Any:
        """Begin to fill x from each rank's own n elements of it, in place.

        Args:
            x: (N,), changed in place.

        Returns:
            A handle, as of `reduce_scatter`.
        """
        if self.size == 1:
            return _Done()
        return _all_gather(x, self._own(x), group=self.group, async_op=True)  # type: ignore[misc]

    def _own(self, x: Tensor) -> Tensor:
        """Return this rank's part of a vector."""
        n = x.numel() // self.size
        return x[self.rank * n : (self.rank + 1) * n]

    def gather_copies(self, x: Tensor, n: int) -> Tensor:
        """Gather x from the `n` neighbouring ranks that hold copies of the same weights.

        Args:
            x: a vector, of another length for other sets of ranks.
            n: the number of copies.

        Returns:
            (n, x.numel()).
        """
        counts = [x.numel() if rank // n == self.rank // n else 0 for rank in range(self.size)]
        out = x.new_empty((n, x.numel()))
        dist.all_to_all_single(out.view(-1), x.repeat(n), counts, counts, group=self.group)
        return out

    def sum_copies(self, x: Tensor, n: int) -> None:
        """Sum x over the `n` neighbouring ranks that hold copies of the same weights, in place, exactly alike on all.

        Args:
            x: a vector.
            n: the number of copies.
        """
        if n == self.size:
            self.all_reduce(x)
        elif n > 1:
            x.copy_(self.gather_copies(x, n).sum(0))

    def copy_in(self, x: Tensor) -> Tensor:
        """Return x; the backward pass sums the gradients over the ranks. Used before a column-parallel layer.

        Args:
            x: a tensor that is the same on all ranks.
        """
        return x if self.size == 1 else _CopyIn.apply(x, self)  # type: ignore[return-value]

    def reduce_out(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, perhaps in place; the backward pass is the identity. Used after a row-parallel layer.

        Args:
            x: this rank's partial sum.
        """
        if self.size == 1:
            return x
        if self.symmetric_memory is not None and not torch.is_grad_enabled() and self.symmetric_memory.can_sum(x):
            return self.symmetric_memory.all_reduce(x)
        return _ReduceOut.apply(x, self)  # type: ignore[return-value]

    # Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198): between the products of a layer each rank has n
    # consecutive tokens. A reduce-scatter and an all-gather together move as many bytes as an all-reduce.

    def gather_rows(self, x: Tensor) -> Tensor:
        """Gather the ranks' rows; the backward pass sums gradients and scatters them. Replaces `copy_in`.

        Args:
            x: (n, ...).

        Returns:
            (N, ...).
        """
        return x if self.size == 1 else _Exchange.apply(x, self.all_gather_rows, self.reduce_scatter_rows)  # type: ignore[return-value]

    def scatter_rows(self, x: Tensor) -> Tensor:
        """Sum x over the ranks and return this rank's rows; the backward pass gathers. Replaces `reduce_out`.

        Args:
            x: (N, ...), this rank's partial sum.

        Returns:
            (n, ...).
        """
        return x if self.size == 1 else _Exchange.apply(x, self.reduce_scatter_rows, self.all_gather_rows)  # type: ignore[return-value]

    def gather_rows_equal(self, x: Tensor) -> Tensor:
        """Gather the ranks' rows, if the gradient is the same on all ranks; the backward pass takes this rank's rows.

        Args:
            x: (n, ...).

        Returns:
            (N, ...).
        """
        return x if self.size == 1 else _Exchange.apply(x, self.all_gather_rows, self.own_rows)  # type: ignore[return-value]

    def all_gather_rows(self, x: Tensor) -> Tensor:
        """Gather the ranks' rows, outside autograd.

        Args:
            x: (n, ...).

        Returns:
            (N, ...).
        """
        out, work = self.begin_all_gather_rows(x)
        wait_for(work)
        return out

    def begin_all_gather_rows(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begin to gather the ranks' rows, outside autograd.

        Args:
            x: (n, ...).

        Returns:
            (N, ...), and a handle to `wait_for` before reading it.
        """
        if self.size == 1:
            return x, _Done()
        out = x.new_empty((self.size * len(x), *x.shape[1:]))
        return out, _all_gather(out, x.contiguous(), group=self.group, async_op=True)  # type: ignore[misc]

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """Sum x over the ranks and return this rank's rows, outside autograd.

        Args:
            x: (N, ...), this rank's partial sum.

        Returns:
            (n, ...).
        """
        if self.size == 1:
            return x
        out = x.new_empty((len(x) // self.size, *x.shape[1:]))
        _reduce_scatter(out, x.contiguous(), group=self.group)  # type: ignore[misc]
        return out

    def own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows (n, ...).

        Args:
            x: (N, ...).
        """
        n = len(x) // self.size
        return x[self.rank * n : (self.rank + 1) * n]

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors along a dimension, outside autograd.

        Args:
            x: a tensor of one shape on all ranks.
            dim: the dimension.
        """
        if self.size == 1:
            return x
        return torch.cat(self._pieces(x), dim=dim)

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        """Stack the ranks' tensors, (size, *x.shape), outside autograd.

        Args:
            x: a tensor of one shape on all ranks.
        """
        if self.size > 1 and self.symmetric_memory is not None and self.symmetric_memory.can_gather(x):
            return self.symmetric_memory.all_gather(x)
        return torch.stack(self._pieces(x)) if self.size > 1 else x.unsqueeze(0)

    def _pieces(self, x: Tensor) -> list[Tensor]:
        """Return x of each rank."""
        pieces = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(pieces, x.contiguous(), group=self.group)
        return pieces

    def columns_to_rows(self, x: Tensor) -> Tensor:
        """Exchange this rank's columns of all rows for all columns of its rows (all-to-all). Differentiable.

        Args:
            x: (N, V, ...), this rank's columns. The ranks divide N.

        Returns:
            (n, size * V, ...). The ranks' rows and columns are in the order of the ranks.
        """
        return x if self.size == 1 else _Exchange.apply(x, self._columns_to_rows, self._rows_to_columns)  # type: ignore[return-value]

    def rows_to_columns(self, x: Tensor) -> Tensor:
        """Exchange all columns of this rank's rows for its columns of all rows, the inverse of `columns_to_rows`.

        Args:
            x: (n, V, ...), this rank's rows. The ranks divide V.

        Returns:
            (N, V / size, ...).
        """
        return x if self.size == 1 else _Exchange.apply(x, self._rows_to_columns, self._columns_to_rows)  # type: ignore[return-value]

    def _columns_to_rows(self, x: Tensor) -> Tensor:
        """Do the exchange of `columns_to_rows` outside autograd."""
        pieces = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(pieces, x.contiguous(), group=self.group)
        return pieces.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def _rows_to_columns(self, x: Tensor) -> Tensor:
        """Do the exchange of `rows_to_columns` outside autograd."""
        pieces = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        out = torch.empty_like(pieces)
        dist.all_to_all_single(out, pieces, group=self.group)
        return out

    def gather_to(self, x: Tensor, rank: int) -> list[Tensor]:
        """Gather the ranks' tensors on one rank.

        Args:
            x: a tensor of one shape on all ranks.
            rank: the rank that receives.

        Returns:
            The tensors, or an empty list on other ranks.
        """
        if self.size == 1:
            return [x]
        pieces = [torch.empty_like(x) for _ in range(self.size)] if self.rank == rank else []
        dist.gather(x.contiguous(), pieces or None, group=self.group, group_dst=rank)
        return pieces


class _Done:
    """The handle of a collective in a group of one."""

    def wait(self) -> None:
        """Return at once."""


def wait_for(work: Any) -> None:
    """Wait for a collective. Stack traces of a hang show this function.

    Args:
        work: the handle of the collective.
    """
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


class _Exchange(torch.autograd.Function):
    """Applies one exchange in the forward pass, and its inverse in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None
