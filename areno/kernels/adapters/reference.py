"""The second product of LoRA adapters in plain torch, and the columns of a fused layer that have adapters.

Shape letters as in `areno.kernels.adapters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 128  # columns of y of one program of the Triton kernels


class Place(NamedTuple):
    """The outputs of one A: `size` columns of y from `column` on, and `size` rows of b from `row` on."""

    column: int
    row: int
    size: int


def tiles(places: tuple[Place, ...], rank: int, device: torch.device, whole: int = 0) -> Tensor:
    """Cut the adapted columns into the tiles of the Triton kernels.

    Args:
        places: where the outputs of each A are.
        rank: the rank R of the adapters.
        device: the device of the result.
        whole: the number of columns of y to cover, for kernels that copy y. 0: adapted columns only.

    Returns:
        (T, 4) int32: first column in y, first row in b, number of columns, first column in h. Columns without adapter
        have -1 as their column in h.
    """
    covered = [(place, index * rank) for index, place in enumerate(places)]
    end = 0
    for place in sorted(places, key=lambda each: each.column):
        if end < min(place.column, whole):
            covered.append((Place(end, 0, place.column - end), -1))
        end = place.column + place.size
    if end < whole:
        covered.append((Place(end, 0, whole - end), -1))
    rows = [
        (place.column + at, place.row + at, min(TILE, place.size - at), h_column)
        for place, h_column in covered
        for at in range(0, place.size, TILE)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def add_lora(
    y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, places: Sequence[tuple[int, int, int]], scaling: float
) -> Tensor:
    """Add the adapters to the output of a layer in plain torch, differentiable.

    Args:
        y_NO: the output of the layer, unchanged.
        h_NR: the first products x A^T.
        b_SR: the stacked B matrices.
        places: where the outputs of each A are.
        scaling: alpha / rank.

    Returns:
        (N, O), a new tensor.
    """
    rank, end, pieces = b_SR.shape[1], 0, []
    for index, (column, row, size) in enumerate(places):
        if column > end:
            pieces.append(y_NO[:, end:column])
        end = column + size
        # Contiguous, so that the library computes a row in the same way for any number of rows.
        h_Nr = h_NR[:, index * rank : (index + 1) * rank].contiguous()
        pieces.append(torch.add(y_NO[:, column:end], F.linear(h_Nr, b_SR[row : row + size]), alpha=scaling))
    if end < y_NO.shape[1]:
        pieces.append(y_NO[:, end:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
