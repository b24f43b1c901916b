"""Sums of the copies of rows: the backward pass of a gather that takes some rows several times.

The Triton kernel adds the copies of a row in a fixed order in float32 and rounds once, so the sum is the same in each
run. `rows_M` (int64) has the row of each copy. Shape letters: N rows, M copies, X elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areno.kernels.backend import dispatch_by_device
from areno.kernels.copies import reference

__all__ = ["copy_rows", "order_of_copies", "sum_copies"]


def order_of_copies(rows_M: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Sort the copies by row, once for all calls of `sum_copies`.

    Returns the sorted indices of the copies, (M,), and the index among them of each row's first copy, followed by M.
    """
    sorted_M, order_M = rows_M.sort(stable=True)
    return order_M, torch.searchsorted(sorted_M, torch.arange(n_rows + 1, device=rows_M.device))


sum_copies = dispatch_by_device(reference.sum_copies)
"""Return the sum of the copies of each row, (N, X), zeros for a row without copies. Copies are contiguous."""


def copy_rows(x_NX: Tensor, rows_M: Tensor, order: Callable[[], tuple[Tensor, Tensor]] | None = None) -> Tensor:
    """Return copies of rows, with gradients. `order` returns the result of `order_of_copies`, None computes it."""
    return _CopyRows.apply(x_NX, rows_M, order)  # type: ignore[return-value]


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, rows_M: Tensor, order: Callable[[], tuple[Tensor, Tensor]] | None) -> Tensor:
        ctx.save_for_backward(rows_M)
        ctx.n_rows, ctx.order = len(x_NX), order
        return x_NX.index_select(0, rows_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows_M,) = ctx.saved_tensors
        order = order_of_copies(rows_M, ctx.n_rows) if ctx.order is None else ctx.order()
        grad_M = grads[0]
        flat_MX = (grad_M.unsqueeze(1) if grad_M.dim() == 1 else grad_M.flatten(1)).contiguous()
        return sum_copies(flat_MX, *order).view(ctx.n_rows, *grad_M.shape[1:]), None, None
