"""Rotary position embedding (arXiv 2104.09864): plain, linearly scaled, and with the frequency bands of Llama 3.

Shape letters: N tokens, H heads, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from areno.layers.rope_config import Rope


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """(F,) float32 on the CPU: radians turned from one position to the next."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freqs_F = 1.0 / (rope.theta**exponents_F)
    if rope.kind != "llama3":
        return freqs_F / rope.factor
    wavelengths_F = 2 * math.pi / freqs_F
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth_F = ((rope.original_max_positions / wavelengths_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth_F) * freqs_F / rope.factor + smooth_F * freqs_F


class Rotary(nn.Module):
    """Angles from positions, computed in each forward pass: as cheap as a table, and no context length to outgrow."""

    freqs_F: Tensor

    def __init__(self, rope: Rope, head_dim: int, *, device: torch.device | str):
        super().__init__()
        self.register_buffer("freqs_F", frequencies(rope, head_dim).to(device), persistent=False)

    @torch.no_grad()
    def forward(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """int64 positions to cos and sin, each (N, 1, F) float32."""
        angles_N1F = (positions_N.float().unsqueeze(-1) * self.freqs_F).unsqueeze(1)
        return angles_N1F.cos(), angles_N1F.sin()


def rotate(x_NHD: Tensor, cos_N1F: Tensor, sin_N1F: Tensor) -> Tensor:
    """Turn the pairs (x[f], x[f + F]) of each head by their angle; computed in fp32, returned in the dtype of x."""
    return _Rotate.apply(x_NHD, cos_N1F, sin_N1F)  # type: ignore[return-value]


def _turn(x_NHD: Tensor, cos_N1F: Tensor, sin_N1F: Tensor) -> Tensor:
    a_NHF, b_NHF = x_NHD.float().chunk(2, dim=-1)
    turned = torch.cat((a_NHF * cos_N1F - b_NHF * sin_N1F, b_NHF * cos_N1F + a_NHF * sin_N1F), dim=-1)
    return turned.to(x_NHD.dtype)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing but the angles is kept for it."""

    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_N1F: Tensor, sin_N1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1F, sin_N1F)
        return _turn(x_NHD, cos_N1F, sin_N1F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_N1F, sin_N1F = ctx.saved_tensors
        return _turn(grads[0], cos_N1F, -sin_N1F), None, None
