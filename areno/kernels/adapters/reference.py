"""Where the adapted columns of a fused layer are. Letters as in the package.

The plain form. Letters as in the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 128  # columns of y that a program of the kernel works on


class Place(NamedTuple):
    """Where the outputs of one A are: the first column in y, the first row in b, and their number."""

    column: int
    row: int
    size: int


def tiles(places: tuple[Place, ...], rank: int, device: torch.device, whole: int = 0) -> Tensor:
    """(T, 4) int32, for the kernel: first column in y, first row in b, number of columns, first column in h.

    whole: the columns of y that are to be covered. Those outside of all places have -1 in the place of h's.
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


def add_up(y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, places: Sequence[tuple[int, int, int]], scaling: float) -> Tensor:
    """A new tensor. Differentiable."""
    rank, end, pieces = b_SR.shape[1], 0, []
    for index, (column, row, size) in enumerate(places):
        if column > end:
            pieces.append(y_NO[:, end:column])
        end = column + size
        # Contiguous, so that a library computes a row in the same way beside any number of others.
        h_Nr = h_NR[:, index * rank : (index + 1) * rank].contiguous()
        pieces.append(torch.add(y_NO[:, column:end], F.linear(h_Nr, b_SR[row : row + size]), alpha=scaling))
    if end < y_NO.shape[1]:
        pieces.append(y_NO[:, end:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
