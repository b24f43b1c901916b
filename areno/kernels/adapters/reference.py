"""The plain form. Letters as in the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


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
