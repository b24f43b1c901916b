# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The second product of LoRA adapters as Triton kernels: all projections in one launch, summed in fp32, rounded once.

The kernels for stacked outputs use programmatic dependent launch (`kernels/jit.py`): b does not depend on the previous
kernel, so they load it first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.adapters.reference import TILE, AdapterSlice
from areno.kernels.elementwise.triton_swiglu import glu
from areno.kernels.jit import kernel, load_fp32, load_masked, round_to_dtype

MANY_ROWS = 1024  # if y has more rows than this, a program computes 32 rows instead of 16


def add_lora(y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, tiles_T4: Tensor, scaling: float) -> Tensor:
    return _add_lora(y_NO, y_NO, h_NR.contiguous(), b_SR, tiles_T4, scaling)


def add_lora_stacked(both_NX: Tensor, b_SR: Tensor, tiles_T4: Tensor, scaling: float, n_columns: int) -> Tensor:
    """Return y + scaling * h B^T. `both_NX` has the columns of y, then those of h. `tiles_T4` covers all of y."""
    out_NO = both_NX.new_empty((len(both_NX), n_columns))
    return _add_lora(both_NX, out_NO, both_NX[:, n_columns:], b_SR, tiles_T4, scaling, pdl=True)


def _add_lora(
    y_NO: Tensor, out_NO: Tensor, h_NR: Tensor, b_SR: Tensor, tiles_T4: Tensor, scaling: float, pdl: bool = False
) -> Tensor:
    n_rows, sizes = len(out_NO), _sizes(len(out_NO), b_SR.shape[1])
    if n_rows:
        _add_lora_kernel[(triton.cdiv(n_rows, sizes["ROWS"]), len(tiles_T4))](
            y_NO,
            out_NO,
            h_NR,
            b_SR,
            tiles_T4,
            n_rows,
            scaling,
            y_NO.stride(0),
            out_NO.stride(0),
            h_NR.stride(0),
            **sizes,
            **(jit.pdl_options(y_NO.device) if pdl else {}),
        )
    return out_NO


def swiglu_stacked(
    both_NX: Tensor, b_SR: Tensor, slices: tuple[AdapterSlice, ...], scaling: float, n_columns: int, gelu: bool
) -> Tensor:
    """Return silu(gate) * up, (N, I). Gate and up, together `n_columns` = 2 I columns, get their adapters first."""
    n_rows, inner, rank = len(both_NX), n_columns // 2, b_SR.shape[1]
    out_NI = both_NX.new_empty((n_rows, inner))
    sizes = _sizes(n_rows, rank)
    gate, up = (_adapter_at(slices, first, rank) for first in (0, inner))
    if n_rows:
        _swiglu_stacked_kernel[(triton.cdiv(n_rows, sizes["ROWS"]), triton.cdiv(inner, TILE))](
            both_NX,
            out_NI,
            both_NX[:, n_columns:],
            b_SR,
            n_rows,
            scaling,
            both_NX.stride(0),
            inner,
            gate[0],
            up[0],
            GATE_H=gate[1],
            UP_H=up[1],
            GELU=gelu,
            **sizes,
            **jit.pdl_options(both_NX.device),
        )
    return out_NI


def _sizes(n_rows: int, rank: int) -> dict[str, int]:
    """Return tile sizes and number of warps. With more rows for each warp, registers would spill."""
    rows, n_warps = (16, 4) if n_rows <= MANY_ROWS else (32, 8)
    inputs = max(16, min(64, triton.next_power_of_2(rank)))
    return {"RANK": rank, "ROWS": rows, "COLUMNS": TILE, "INPUTS": inputs, "num_warps": n_warps}


def _adapter_at(slices: tuple[AdapterSlice, ...], first: int, rank: int) -> tuple[int, int]:
    """Return (first row in b, first column in h) of the adapter for output column `first`, (0, -1) without adapter."""
    for index, each in enumerate(slices):
        if each.column <= first < each.column + each.size:
            return each.row + first - each.column, index * rank
    return 0, -1


@triton.jit
def _load_first_inputs(b_place, real_column, RANK: tl.constexpr, INPUTS: tl.constexpr):
    """Load the first INPUTS columns of B for a tile of output columns, transposed, (INPUTS, output columns)."""
    at = tl.arange(0, INPUTS)
    return load_masked(b_place + at[:, None], (at < RANK)[:, None] & real_column[None, :])


@triton.jit
def _product(
    h_place,
    b_place,
    b,
    real_row,
    real_column,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return a tile of h B^T in fp32. `b` is the result of `_load_first_inputs`."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.static_range(0, RANK, INPUTS):
        at = start + tl.arange(0, INPUTS)
        inside = at < RANK
        h = load_masked(h_place + at[None, :], real_row[:, None] & inside[None, :])
        if start > 0:
            b = load_masked(b_place + at[:, None], inside[:, None] & real_column[None, :])
        total = tl.dot(h, b, acc=total, input_precision="ieee")
    return total


@kernel(do_not_specialize=["n_rows", "scaling"])
def _add_lora_kernel(
    y_ptr,
    out_ptr,
    h_ptr,
    b_ptr,
    tiles_ptr,
    n_rows,
    scaling,
    y_stride,
    out_stride,
    h_stride,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tiles_ptr + tl.program_id(1) * 4
    y_column, b_row, n_columns, h_column = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    column = tl.arange(0, COLUMNS)
    real_row, real_column = row < n_rows, column < n_columns
    inside = real_row[:, None] & real_column[None, :]
    row = row.to(tl.int64)
    b_place = b_ptr + (b_row + column).to(tl.int64)[None, :] * RANK
    b = _load_first_inputs(b_place, column < tl.where(h_column < 0, 0, n_columns), RANK, INPUTS)
    if PDL:
        jit.wait_for_previous()
    y = load_fp32(y_ptr + row[:, None] * y_stride + (y_column + column)[None, :], inside)
    if h_column >= 0:
        h_place = h_ptr + row[:, None] * h_stride + h_column
        y += scaling * _product(h_place, b_place, b, real_row, real_column, RANK, ROWS, COLUMNS, INPUTS)
    place = out_ptr + row[:, None] * out_stride + (y_column + column)[None, :]
    tl.store(place, y, mask=inside)


@kernel(do_not_specialize=["n_rows", "scaling", "gate_row", "up_row"])
def _swiglu_stacked_kernel(
    both_ptr,
    out_ptr,
    h_ptr,
    b_ptr,
    n_rows,
    scaling,
    both_stride,
    n_inner,
    gate_row,
    up_row,
    RANK: tl.constexpr,
    GATE_H: tl.constexpr,
    UP_H: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < n_rows, column < n_inner
    inside = real_row[:, None] & real_column[None, :]
    row = row.to(tl.int64)
    place = both_ptr + row[:, None] * both_stride + column[None, :]
    h_place, b_place = h_ptr + row[:, None] * both_stride, b_ptr + column.to(tl.int64)[None, :] * RANK
    b_of_gate, b_of_up = b_place + gate_row.to(tl.int64) * RANK, b_place + up_row.to(tl.int64) * RANK
    first_of_gate = _load_first_inputs(b_of_gate, real_column, RANK, INPUTS)
    first_of_up = _load_first_inputs(b_of_up, real_column, RANK, INPUTS)
    if PDL:
        jit.wait_for_previous()
    gate = load_fp32(place, inside)
    up = load_fp32(place + n_inner, inside)
    if GATE_H >= 0:
        total = _product(h_place + GATE_H, b_of_gate, first_of_gate, real_row, real_column, RANK, ROWS, COLUMNS, INPUTS)
        gate = round_to_dtype(gate + scaling * total, out_ptr)
    if UP_H >= 0:
        total = _product(h_place + UP_H, b_of_up, first_of_up, real_row, real_column, RANK, ROWS, COLUMNS, INPUTS)
        up = round_to_dtype(up + scaling * total, out_ptr)
    tl.store(out_ptr + row[:, None] * n_inner + column[None, :], glu(gate, up, out_ptr, GELU), mask=inside)
