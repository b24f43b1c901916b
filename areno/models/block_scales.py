"""Weights of checkpoints that are in FP8 or MXFP4, with a scale for each block. Loading dequantizes them.

A block of FP8 is often 128 x 128. One of MXFP4 (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)
has 32 numbers of 4 bits and one power of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.errors import CheckpointError
from areno.models.config import shape_of_scales

_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of codes 0 to 7. Codes from 8 on are negative
_MXFP4_BIAS = 127  # of the exponents


class BlockScaledSlice:
    """A weight in FP8 as a slice of safetensors that returns dequantized values in float32.

    `scales` are the tensor that has one number for each block of `size` (rows, columns).
    """

    def __init__(self, codes: Any, scales: Tensor, size: tuple[int, int]):
        self._codes, self._scales, self._size = codes, scales.float(), size

    @staticmethod
    def checked(name: str, codes: Any, scales: Tensor, size: tuple[int, int]) -> BlockScaledSlice:
        """Return the slice, or raise CheckpointError if codes and scales of the weight `name` do not fit together."""
        shape, dtype = codes.get_shape(), codes.get_dtype()
        fits = len(shape) == 2 and list(scales.shape) == shape_of_scales(shape, size) and scales.is_floating_point()
        if not fits or dtype != "F8_E4M3":
            text = (
                f"{name} in FP8 is {dtype} {tuple(shape)} with scales {str(scales.dtype)[6:]} {tuple(scales.shape)}; "
            )
            text += f"expected a matrix in F8_E4M3 with one float for each block of {size[0]} x {size[1]} "
            raise CheckpointError(text + "(config.json: weight_block_size)")
        return BlockScaledSlice(codes, scales, size)

    def get_shape(self) -> list[int]:
        return self._codes.get_shape()

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        (n_rows, n_columns), (rows, columns) = self.get_shape(), self._size
        scales = self._scales.repeat_interleave(rows, 0)[:n_rows].repeat_interleave(columns, 1)[:, :n_columns]
        return self._codes[index].float() * scales[index]


class MXFP4Slice:
    """Matrices of experts in MXFP4 as a slice of safetensors that returns bfloat16 values (experts, inputs, outputs).

    The codes are (experts, outputs, blocks, 16), two numbers in each byte, the first one in the lower half. The scales
    are (experts, outputs, blocks).
    """

    def __init__(self, codes: Any, scales: Tensor):
        self._codes, self._scales = codes, scales

    @staticmethod
    def checked(name: str, codes: Any, scales: Tensor) -> MXFP4Slice:
        """Return the slice, or raise CheckpointError if codes and scales of the weight `name` do not fit together."""
        shape, expected = codes.get_shape(), [*scales.shape, 16]
        if len(shape) != 4 or shape != expected or codes.get_dtype() != "U8" or scales.dtype != torch.uint8:
            text = f"{name} in MXFP4 has blocks {codes.get_dtype()} {tuple(shape)} and scales {tuple(scales.shape)}; "
            raise CheckpointError(text + "expected U8 blocks of 16 bytes (experts, outputs, blocks, 16) with one scale")
        return MXFP4Slice(codes, scales)

    def get_shape(self) -> list[int]:
        n_experts, n_outputs, n_blocks, n_bytes = self._codes.get_shape()
        return [n_experts, 2 * n_blocks * n_bytes, n_outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, inputs, outputs = index
        codes, scales = self._codes[experts, outputs], self._scales[experts, outputs]
        values = torch.tensor([*_MXFP4, *(-value for value in _MXFP4)], dtype=torch.bfloat16)
        bytes_ = torch.arange(256)
        pairs = torch.stack((values[bytes_ & 15], values[bytes_ >> 4]), dim=-1).view(torch.int32).flatten()
        numbers = pairs.index_select(0, codes.int().flatten()).view(torch.bfloat16)
        powers = torch.ldexp(torch.ones(scales.shape), scales.int() - _MXFP4_BIAS).bfloat16()
        return numbers.view(*scales.shape, -1).mul_(powers.unsqueeze(-1)).flatten(-2).transpose(1, 2)[:, inputs]
