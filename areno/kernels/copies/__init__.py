"""Sums of the copies of rows: the backward pass of a gather that takes some rows several times.

The Triton kernel adds the copies of a row in a fixed order in float32 and rounds once, so the sum is the same in each
run. Shape letters: N rows, M copies, X elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.backend import form

__all__ = ["order_of_copies", "sum_copies"]


def order_of_copies(places_M: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Sort copies by their rows, once for all calls of `sum_copies`.

    Args:
        places_M: int64, the row of each copy.
        n_rows: N.

    Returns:
        (order_M, starts): int64 indices of the copies, in the order of their rows, and (N + 1,) int64 index in order_M
        of the first copy of each row, and M.
    """
    starts = torch.zeros(n_rows + 1, dtype=torch.int64, device=places_M.device)
    torch.cumsum(torch.bincount(places_M, minlength=n_rows), 0, out=starts[1:])
    return places_M.argsort(stable=True), starts


def sum_copies(copies_MX: Tensor, order_M: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of the copies of each row, (N, X) in the dtype of the copies, zeros for a row without copies.

    Args:
        copies_MX: the copies, contiguous.
        order_M: first result of `order_of_copies`.
        starts: second result of `order_of_copies`.
    """
    return form(copies_MX, __name__).sum_copies(copies_MX, order_M, starts)
