"""Weights of checkpoints that are in FP8, with a scale for each block, often of 128 x 128. Loading dequantizes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class BlockScaledSlice:
    """A weight in FP8 as a slice of safetensors that returns dequantized values in float32.

    `scales` are the tensor that has one number for each block of `size` (rows, columns).
    """

    def __init__(self, codes: Any, scales: Tensor, size: tuple[int, int]):
        self._codes, self._scales, self._size = codes, scales.float(), size

    def get_shape(self) -> list[int]:
        return self._codes.get_shape()

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        (n_rows, n_columns), (rows, columns) = self.get_shape(), self._size
        scales = self._scales.repeat_interleave(rows, 0)[:n_rows].repeat_interleave(columns, 1)[:, :n_columns]
        return self._codes[index].float() * scales[index]
