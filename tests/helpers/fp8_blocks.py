"""Weights in FP8 with a scale for each block."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 20, 12  # of a block, which do not divide the weights


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the values that they stand for, block by block."""
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-weight.shape[0] // ROWS), -(-weight.shape[1] // COLUMNS))
    values = torch.zeros(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            values[place] = codes[place].float() * scales[i, j]
    return codes, scales, values
