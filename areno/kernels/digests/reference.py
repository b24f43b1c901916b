"""Digests in plain torch, which read every word twice."""

from __future__ import annotations

import torch
from torch import Tensor

# The constants of splitmix64, as signed numbers.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def matrix_digests(words_NRC: Tensor) -> Tensor:
    return _mixed(words_NRC.sum(1), 1) + _mixed(words_NRC.sum(2), words_NRC.shape[2] + 1)


def _mixed(sums: Tensor, first: int) -> Tensor:
    """Spread each bit of each sum over 64 bits, as splitmix64 does, and add up. `first` is the place of the first."""
    mixed = sums + torch.arange(first, first + sums.shape[1], device=sums.device) * GAMMA
    mixed = (mixed ^ (mixed >> 30)) * FACTORS[0]
    mixed = (mixed ^ (mixed >> 27)) * FACTORS[1]
    return (mixed ^ (mixed >> 31)).sum(1)
