# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Sums of the copies of rows as a Triton kernel: a program adds the copies of one row, in their order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_fp32, program_id_64

_BLOCK = 1024  # elements of a row that a program adds


def sum_copies(copies_MX: Tensor, order_M: Tensor, starts: Tensor) -> Tensor:
    n_rows, size = len(starts) - 1, copies_MX.shape[1]
    sums_NX = copies_MX.new_empty((n_rows, size))
    if n_rows:
        _sum_kernel[(n_rows, triton.cdiv(size, _BLOCK))](copies_MX, sums_NX, order_M, starts, size, BLOCK=_BLOCK)
    return sums_NX


@kernel
def _sum_kernel(copies_ptr, sums_ptr, order_ptr, starts_ptr, size, BLOCK: tl.constexpr):
    row = program_id_64(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        copy = tl.load(order_ptr + place)
        total += load_fp32(copies_ptr + copy * size + columns, columns < size)
    tl.store(sums_ptr + row * size + columns, total, mask=columns < size)
