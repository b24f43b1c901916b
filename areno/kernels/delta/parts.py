"""What a gated delta layer is made of, and what it remembers of a row. Letters as in the package."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaWeights(NamedTuple):
    """Of one layer on one rank. log_decay: the logarithm of how fast states decay. norm, eps: of the result's heads."""

    conv_XW: Tensor
    log_decay_H: Tensor
    bias_H: Tensor
    norm_V: Tensor
    eps: float
    n_key_heads: int

    @property
    def n_heads(self) -> int:
        return len(self.log_decay_H)

    @property
    def value_dim(self) -> int:
        return len(self.norm_V)

    @property
    def key_dim(self) -> int:
        return (len(self.conv_XW) - self.n_heads * self.value_dim) // (2 * self.n_key_heads)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the parts of a token's P numbers: inputs of the convolution, z, b, a."""
        return len(self.conv_XW), self.n_heads * self.value_dim, self.n_heads, self.n_heads


class DeltaGradients(NamedTuple):
    """Of the weights, float32 and in their shapes."""

    conv_XW: Tensor
    log_decay_H: Tensor
    bias_H: Tensor
    norm_V: Tensor


class DeltaStates(NamedTuple):
    """Of one layer: the last inputs of the convolution, the oldest first, and the matrices, float32."""

    inputs_SXw: Tensor
    matrices_SHKV: Tensor
