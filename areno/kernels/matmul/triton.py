# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""A matrix product without split-K as a Triton kernel, so a row's result does not depend on the number of other rows.

Shape letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel

# (largest number of rows, (rows, columns and inputs of a tile, warps, stages)). The fastest on an H200.
_TILES = ((16, (16, 32, 256, 4, 4)), (64, (64, 32, 128, 4, 4)), (sys.maxsize, (64, 64, 128, 4, 4)))


def fixed_order_product(x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T (N, O) in `dtype`. One program loops over all of I for a tile of rows and columns."""
    x_NI = x_NI.contiguous()
    (n_rows, n_inputs), n_columns = x_NI.shape, len(weight_OI)
    out_NO = x_NI.new_empty((n_rows, n_columns), dtype=dtype)
    rows, columns, inputs, n_warps, n_stages = next(tile for most, tile in _TILES if n_rows <= most)
    if n_rows:
        # Programs that share a tile of the weight run one after another, while the tile is in the L2 cache.
        _product_kernel[(triton.cdiv(n_rows, rows), triton.cdiv(n_columns, columns))](
            x_NI,
            weight_OI,
            out_NO,
            n_rows,
            n_columns,
            n_inputs,
            weight_OI.stride(0),
            ROWS=rows,
            COLUMNS=columns,
            INPUTS=inputs,
            num_warps=n_warps,
            num_stages=n_stages if x_NI.element_size() < 4 else 2,  # more stages of fp32 do not fit into shared memory
        )
    return out_NO


@kernel(do_not_specialize=["n_rows"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    n_rows,
    n_columns,
    n_inputs,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < n_rows, column < n_columns
    x_place = x_ptr + row.to(tl.int64)[:, None] * n_inputs
    weight_place = weight_ptr + column.to(tl.int64)[None, :] * stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n_inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        inside = at < n_inputs
        x = tl.load(x_place + at[None, :], mask=real_row[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_place + at[:, None], mask=inside[:, None] & real_column[None, :], other=0.0)
        total = tl.dot(x, weight, acc=total, input_precision="ieee")
    place = out_ptr + row.to(tl.int64)[:, None] * n_columns + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])
