# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Digests as a Triton kernel, which reads every word once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.digests import reference
from areno.kernels.jit import kernel, load_masked, program_id_64

_ROWS = 2  # that a program reads at once; with 1024 columns, 128 bytes for each of its threads


def matrix_digests(words_NRC: Tensor) -> Tensor:
    n, rows, columns = words_NRC.shape
    digests_N = words_NRC.new_empty(n)
    if n:
        constants = {"GAMMA": reference.GAMMA, "FACTOR_1": reference.FACTORS[0], "FACTOR_2": reference.FACTORS[1]}
        block = triton.next_power_of_2(columns)
        _digest_kernel[(n,)](words_NRC, digests_N, rows, columns, **constants, ROWS=_ROWS, BLOCK=block, num_warps=4)
    return digests_N


@kernel
def _digest_kernel(
    words_ptr,
    digests_ptr,
    n_rows,
    COLUMNS: tl.constexpr,
    GAMMA: tl.constexpr,
    FACTOR_1: tl.constexpr,
    FACTOR_2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = program_id_64(0)
    columns = tl.arange(0, BLOCK)
    is_column = columns < COLUMNS
    sums = tl.zeros([ROWS, BLOCK], tl.int64)
    of_rows = tl.zeros([ROWS], tl.int64)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row = rows < n_rows
        offsets = (matrix * n_rows + rows[:, None]) * COLUMNS + columns[None, :]
        words = load_masked(words_ptr + offsets, is_row[:, None] & is_column[None, :])
        sums += words
        mixed = _mixed(tl.sum(words, 1), COLUMNS + 1 + rows, GAMMA, FACTOR_1, FACTOR_2)
        of_rows += tl.where(is_row, mixed, 0)
    of_columns = _mixed(tl.sum(sums, 0), 1 + columns, GAMMA, FACTOR_1, FACTOR_2)
    digest = tl.sum(tl.where(is_column, of_columns, 0), 0) + tl.sum(of_rows, 0)
    tl.store(digests_ptr + matrix, digest)


@triton.jit
def _mixed(sums, places, GAMMA: tl.constexpr, FACTOR_1: tl.constexpr, FACTOR_2: tl.constexpr):
    mixed = sums + places.to(tl.int64) * GAMMA
    mixed = (mixed ^ (mixed >> 30)) * FACTOR_1
    mixed = (mixed ^ (mixed >> 27)) * FACTOR_2
    return mixed ^ (mixed >> 31)
