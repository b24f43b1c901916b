"""Where the adapted columns of a fused layer are. Letters as in the package."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # columns of y that a program of the kernel works on


class Place(NamedTuple):
    """Where the outputs of one A are: the first column in y, the first row in b, and their number."""

    column: int
    row: int
    size: int


def tiles(places: tuple[Place, ...], rank: int, device: torch.device) -> Tensor:
    """(T, 4) int32, for the kernel: first column in y, first row in b, number of columns, first column in h."""
    rows = [
        (place.column + at, place.row + at, min(TILE, place.size - at), index * rank)
        for index, place in enumerate(places)
        for at in range(0, place.size, TILE)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device)
