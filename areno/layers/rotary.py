"""Rotary position embedding (arXiv 2104.09864), with the scalings that `RopeConfig` describes.

Shape letters: N tokens, H heads, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from areno.layers.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the rotation per position, in radians, of each pair of elements of a head, (F,) float32.

    Pairs that are not rotated have frequency 0.
    """
    if rope.kind == "none":
        return torch.zeros(head_dim // 2)
    freqs_R = _frequencies(rope, rope.rotary_dim(head_dim))
    return torch.nn.functional.pad(freqs_R, (0, head_dim // 2 - len(freqs_R)))


def head_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Return the checkpoint index of each element of a head in the model, (D,). None if the orders are equal.

    `rotate` turns pairs of elements half a head apart, but some checkpoints pair other elements. Their heads are
    permuted when weights are loaded. Attention gives the same result if queries and keys are permuted alike.
    """
    dim = rope.rotary_dim(head_dim)
    if dim == head_dim and not rope.interleaved:
        return None
    rotated = torch.arange(dim)
    first, second = (rotated[0::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    rest = torch.arange(dim, head_dim).chunk(2) if dim < head_dim else (rotated[:0], rotated[:0])
    return torch.cat((first, rest[0], second, rest[1]))


def permute_heads(rows: Tensor, order_D: Tensor) -> Tensor:
    """Return a copy of a weight (heads * D, ...) in which row i of every head is the former row order_D[i]."""
    return rows.unflatten(0, (-1, len(order_D)))[:, order_D].flatten(0, 1)


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the scaled frequencies of the rotated pairs. `head_dim` counts only the rotated elements."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freqs_F = 1.0 / (rope.theta**exponents_F)
    if rope.kind in ("default", "dynamic"):
        return freqs_F
    if rope.kind == "linear":
        return freqs_F / rope.factor
    if rope.kind == "longrope":
        return freqs_F / torch.tensor(rope.short_factors)
    kept_F = (
        _llama3_extrapolation_factor(freqs_F, rope)
        if rope.kind == "llama3"
        else _yarn_extrapolation_factor(rope, head_dim)
    )
    return (1 - kept_F) * freqs_F / rope.factor + kept_F * freqs_F


def _llama3_extrapolation_factor(freqs_F: Tensor, rope: RopeConfig) -> Tensor:
    """Return how much of each frequency is kept: 1 keeps it, 0 divides it by `rope.factor`, others interpolate."""
    wavelengths_F = 2 * math.pi / freqs_F
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return ((rope.original_max_positions / wavelengths_F - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_extrapolation_factor(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return how much of each frequency is kept, as in `_llama3_extrapolation_factor`."""

    def index_of(turns: float) -> float:
        """Return the fractional index of the frequency that turns so many times within the original context."""
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)


class Rotary(nn.Module):
    """Computes cosines and sines from positions in each pass. This is as fast as a table, and has no maximum length."""

    freqs_F: Tensor
    scale_F: Tensor | None  # factor of queries and keys for each pair of elements; None means 1

    def __init__(self, rope: RopeConfig, head_dim: int, *, device: torch.device | str):
        super().__init__()
        self.register_buffer("freqs_F", frequencies(rope, head_dim).to(device), persistent=False)
        scale_F = None
        if rope.attention_factor != 1.0:  # elements that are not rotated are not scaled
            scale_F = torch.where(self.freqs_F > 0, rope.attention_factor, 1.0)
        self.register_buffer("scale_F", scale_F, persistent=False)

    @torch.no_grad()
    def forward(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles, both multiplied by `scale_F`, (N, 1, F) float32 each."""
        angles_N1F = (positions_N.float().unsqueeze(-1) * self.freqs_F).unsqueeze(1)
        cos_N1F, sin_N1F = angles_N1F.cos(), angles_N1F.sin()
        return (cos_N1F, sin_N1F) if self.scale_F is None else (cos_N1F * self.scale_F, sin_N1F * self.scale_F)


def rotate(x_NHD: Tensor, cos_N1F: Tensor, sin_N1F: Tensor) -> Tensor:
    """Rotate each pair (x[f], x[f + F]) of each head by its angle, in fp32. Differentiable with respect to x."""
    if not torch.is_grad_enabled():
        return _rotate_heads(x_NHD, cos_N1F, sin_N1F)
    return _Rotate.apply(x_NHD, cos_N1F, sin_N1F)  # type: ignore[return-value]


def _rotate_heads(x_NHD: Tensor, cos_N1F: Tensor, sin_N1F: Tensor) -> Tensor:
    """Do `rotate` with few operations, outside autograd."""
    x_NHD, dtype = x_NHD.float(), x_NHD.dtype
    a_NHF, b_NHF = x_NHD.chunk(2, dim=-1)
    turned_NHD = torch.empty(x_NHD.shape, dtype=torch.float32, device=x_NHD.device)
    first_NHF, second_NHF = turned_NHD.chunk(2, dim=-1)
    torch.mul(a_NHF, cos_N1F, out=first_NHF).sub_(b_NHF * sin_N1F)
    torch.mul(b_NHF, cos_N1F, out=second_NHF).add_(a_NHF * sin_N1F)
    return turned_NHD.to(dtype)


class _Rotate(torch.autograd.Function):
    """Saves the angles but not x: the gradient is the inverse rotation, with the same scale."""

    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_N1F: Tensor, sin_N1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1F, sin_N1F)
        return _rotate_heads(x_NHD, cos_N1F, sin_N1F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_N1F, sin_N1F = ctx.saved_tensors
        return _rotate_heads(grads[0], cos_N1F, -sin_N1F), None, None
