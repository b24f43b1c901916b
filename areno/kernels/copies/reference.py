"""Sums of the copies of rows in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_copies(copies_MX: Tensor, order_M: Tensor, starts: Tensor) -> Tensor:
    n_rows = len(starts) - 1
    rows_M = torch.arange(n_rows, device=starts.device).repeat_interleave(starts.diff())
    dtype = torch.promote_types(copies_MX.dtype, torch.float32)
    sums_NX = torch.zeros(n_rows, copies_MX.shape[1], dtype=dtype, device=copies_MX.device)
    return sums_NX.index_add_(0, rows_M, copies_MX.index_select(0, order_M).to(dtype)).to(copies_MX.dtype)
