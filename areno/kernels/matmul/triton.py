# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""Matrix products in Triton: a kernel without split-K, and `dot`, which other kernels use for products of tiles."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.backend import is_before_ampere
from areno.kernels.jit import kernel, load_masked

# (largest number of rows of x, (rows, columns and inputs of a tile, warps, stages)). The fastest on an H200.
_TILES = ((16, (16, 32, 256, 4, 4)), (64, (64, 32, 128, 4, 4)), (sys.maxsize, (64, 64, 128, 4, 4)))


def fixed_order_matmul(x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute one tile of x W^T in each program, in a loop over all inputs."""
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


@triton.jit
def add_products(total, x_place, weight_place, real_row, real_column, n_inputs, INPUTS: tl.constexpr):
    """Add a tile of x W^T to `total`. `x_place` and `weight_place` point to the first input of each row and column."""
    for start in range(0, n_inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        inside = at < n_inputs
        x = load_masked(x_place + at[None, :], real_row[:, None] & inside[None, :])
        weight = load_masked(weight_place + at[:, None], inside[:, None] & real_column[None, :])
        total = tl.dot(x, weight, acc=total, input_precision="ieee")
    return total


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
    total = add_products(total, x_place, weight_place, real_row, real_column, n_inputs, INPUTS)
    place = out_ptr + row.to(tl.int64)[:, None] * n_columns + column[None, :]
    tl.store(place, total, mask=real_row[:, None] & real_column[None, :])


def dot_precision(x: Tensor, half: str) -> str:
    """Return the `PRECISION` of `dot`: `half` for bfloat16 operands, else "tf32x3" if the GPU has TF32, or "ieee".

    "tf32x3" is as precise as "ieee" and faster.
    """
    if x.dtype == torch.bfloat16:
        return half
    return "tf32x3" if x.is_cuda and not is_before_ampere(x.device) else "ieee"


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return the product a b of two tiles in fp32.

    PRECISION is "bf16", "bf16x3" (each operand as a sum of two bfloat16), "tf32", "tf32x3" or "ieee". The transpose of
    a result must not be an operand: on Hopper, Triton 3.4 to 3.7.0 then give wrong results
    (github.com/fla-org/flash-linear-attention/issues/640).
    """
    if PRECISION == "bf16" or (a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16):  # the latter loses nothing
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "bf16x3":
        return _dot_bf16x3(a, b)
    elif PRECISION == "tf32":
        return tl.dot(_to_tf32(a), _to_tf32(b), input_precision="tf32")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _dot_bf16x3(a, b):
    """Return a b in fp32 from bfloat16 products, with each fp32 operand split into a high and a low part.

    The product of the two low parts is left out. Products with one low part are added first, as they are small.
    """
    if a.dtype == tl.bfloat16:
        high, low = _split_to_bf16(b)
        return tl.dot(a, high, acc=tl.dot(a, low))
    elif b.dtype == tl.bfloat16:
        high, low = _split_to_bf16(a)
        return tl.dot(high, b, acc=tl.dot(low, b))
    else:
        high, low = _split_to_bf16(a)
        other_high, other_low = _split_to_bf16(b)
        total = tl.dot(low, other_high)
        total = tl.dot(high, other_low, acc=total)
        return tl.dot(high, other_high, acc=total)


@triton.jit
def _split_to_bf16(x):
    """Split fp32 into a sum of two bfloat16, which keep 16 of its 24 bits.

    The high part is rounded by integer arithmetic, because a GPU converts pairs of values faster than single values.
    The high part of a NaN may be 0, but its low part is then NaN.
    """
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    low = (x - high).to(tl.bfloat16)
    return high.to(tl.bfloat16), low


@triton.jit
def _to_tf32(x):
    """Round to nearest: a matrix unit truncates fp32 operands, which would give all errors the same sign."""
    if x.dtype == tl.float32:
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # the rounded bits of a NaN may be those of -0
    else:
        return x.to(tl.float32)
