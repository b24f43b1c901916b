# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""All projections of a fused layer in one launch, added in fp32 and rounded once. Letters as in the package."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.adapters.places import TILE


def add_up(y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, tiles_T4: Tensor, scaling: float) -> Tensor:
    """In place of y, which must be contiguous, as h and b must."""
    n_rows, rank = len(y_NO), b_SR.shape[1]
    rows, n_warps = (16, 4) if n_rows <= 16 else (64, 4)
    if n_rows:
        _add_up_kernel[(triton.cdiv(n_rows, rows), len(tiles_T4))](
            y_NO,
            h_NR.contiguous(),
            b_SR,
            tiles_T4,
            n_rows,
            scaling,
            y_NO.shape[1],
            h_NR.shape[1],
            RANK=rank,
            ROWS=rows,
            COLUMNS=TILE,
            INPUTS=max(16, min(64, triton.next_power_of_2(rank))),
            num_warps=n_warps,
        )
    return y_NO


@triton.jit(do_not_specialize=["n_rows", "scaling"])
def _add_up_kernel(
    y_ptr,
    h_ptr,
    b_ptr,
    tiles_ptr,
    n_rows,
    scaling,
    y_stride,
    h_stride,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tiles_ptr + tl.program_id(1) * 4
    y_column, b_row, n_columns, h_column = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    column = tl.arange(0, COLUMNS)
    real_row, real_column = row < n_rows, column < n_columns
    h_place = h_ptr + row.to(tl.int64)[:, None] * h_stride + h_column
    b_place = b_ptr + (b_row + column).to(tl.int64)[None, :] * RANK
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.static_range(0, RANK, INPUTS):
        at = start + tl.arange(0, INPUTS)
        inside = at < RANK
        h = tl.load(h_place + at[None, :], mask=real_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_place + at[:, None], mask=inside[:, None] & real_column[None, :], other=0.0)
        total = tl.dot(h, b, acc=total, input_precision="ieee")
    place = y_ptr + row.to(tl.int64)[:, None] * y_stride + (y_column + column)[None, :]
    inside = real_row[:, None] & real_column[None, :]
    y = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (y + scaling * total).to(y_ptr.dtype.element_ty), mask=inside)
