"""Sums of the copies of rows: the backward pass of a gather that takes some rows several times.

The Triton kernel adds the copies of a row in a fixed order in float32 and rounds once, so the sum is the same in each
run. Shape letters: N rows, M copies, X elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areno.kernels.backend import form

__all__ = ["copy_rows", "order_of_copies", "sum_copies"]


def order_of_copies(places_M: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Sort copies by their rows, once for all calls of `sum_copies`.

    Args:
        places_M: int64, the row of each copy.
        n_rows: N.

    Returns:
        (order_M, starts): int64 indices of the copies, in the order of their rows, and (N + 1,) int64 index in order_M
        of the first copy of each row, and M.
    """
    sorted_M, order_M = places_M.sort(stable=True)
    return order_M, torch.searchsorted(sorted_M, torch.arange(n_rows + 1, device=places_M.device))


def sum_copies(copies_MX: Tensor, order_M: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of the copies of each row, (N, X) in the dtype of the copies, zeros for a row without copies.

    Args:
        copies_MX: the copies, contiguous.
        order_M: first result of `order_of_copies`.
        starts: second result of `order_of_copies`.
    """
    return form(copies_MX, __name__).sum_copies(copies_MX, order_M, starts)


def copy_rows(x_NX: Tensor, places_M: Tensor, order: Callable[[], tuple[Tensor, Tensor]] | None = None) -> Tensor:
    """Return copies of rows, (M, X), as index_select does. The backward pass sums the gradients of a row's copies.

    Args:
        x_NX: the rows, of any number of dimensions.
        places_M: int64, the row of each copy.
        order: function that returns `order_of_copies(places_M, N)`, which only the backward pass calls. None computes
            the order anew.
    """
    return _CopyRows.apply(x_NX, places_M, order)  # type: ignore[return-value]


class _CopyRows(torch.autograd.Function):
    """Autograd function of `copy_rows`."""

    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, places_M: Tensor, order: Callable[[], tuple[Tensor, Tensor]] | None) -> Tensor:
        ctx.save_for_backward(places_M)
        ctx.n_rows, ctx.order = len(x_NX), order
        return x_NX.index_select(0, places_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places_M,) = ctx.saved_tensors
        order = order_of_copies(places_M, ctx.n_rows) if ctx.order is None else ctx.order()
        grad_M = grads[0]
        flat_MX = (grad_M.unsqueeze(1) if grad_M.dim() == 1 else grad_M.flatten(1)).contiguous()
        return sum_copies(flat_MX, *order).view(ctx.n_rows, *grad_M.shape[1:]), None, None
