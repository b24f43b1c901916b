"""The second product of LoRA adapters in plain torch, and the columns of a fused layer that have adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 128  # columns of y that one program of the Triton kernels computes


class AdapterSlice(NamedTuple):
    """The output columns that one adapter changes, and the rows of its matrix in the stacked B matrices."""

    column: int
    row: int
    size: int


def column_tiles(slices: tuple[AdapterSlice, ...], rank: int, device: torch.device, whole: int = 0) -> Tensor:
    """Cut the columns of a layer's output into tiles, one for each program of a Triton kernel.

    A tile is an int32 row of (T, 4): first column in the output, first row in b, number of columns, and first column in
    h, or -1 for columns without an adapter. Such tiles are included only if `whole` is the number of all columns.
    """
    covered = [(part, index * rank) for index, part in enumerate(slices)]
    end = 0
    for part in sorted(slices, key=lambda part: part.column):
        if end < min(part.column, whole):
            covered.append((AdapterSlice(end, 0, part.column - end), -1))
        end = part.column + part.size
    if end < whole:
        covered.append((AdapterSlice(end, 0, whole - end), -1))
    rows = [
        (part.column + at, part.row + at, min(TILE, part.size - at), h_column)
        for part, h_column in covered
        for at in range(0, part.size, TILE)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def add_lora(
    y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, slices: Sequence[tuple[int, int, int]], scaling: float
) -> Tensor:
    rank, end, pieces = b_SR.shape[1], 0, []
    for index, (column, row, size) in enumerate(slices):
        if column > end:
            pieces.append(y_NO[:, end:column])
        end = column + size
        # Contiguous, so that the matrix library computes a row in the same way for any number of rows.
        h_Nr = h_NR[:, index * rank : (index + 1) * rank].contiguous()
        pieces.append(torch.add(y_NO[:, column:end], F.linear(h_Nr, b_SR[row : row + size]), alpha=scaling))
    if end < y_NO.shape[1]:
        pieces.append(y_NO[:, end:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
