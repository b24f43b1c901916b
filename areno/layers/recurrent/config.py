"""The description of layers with a recurrent state, without torch: a model's config holds one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Layers with the gated delta rule in the place of attention; see `areno/kernels/delta`.

    layers: their numbers. width: of the convolution in front. Key heads are shared by equally many value heads each.
    """

    layers: tuple[int, ...]
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def n_channels(self) -> int:
        """Inputs of the convolution."""
        return 2 * self.n_key_heads * self.key_dim + self.inner_size

    @property
    def inner_size(self) -> int:
        """Of the result, all heads."""
        return self.n_value_heads * self.value_dim

    @property
    def projections(self) -> tuple[int, ...]:
        """Outputs of each projection in a layer's first product: q, k and v, which are convolved, then z, b and a."""
        of_keys = self.n_key_heads * self.key_dim
        return (of_keys, of_keys, self.inner_size, self.inner_size, self.n_value_heads, self.n_value_heads)

    @property
    def projected(self) -> int:
        """Numbers of a token that a layer's first product gives."""
        return sum(self.projections)

    def parameters(self, hidden_size: int, tp_size: int = 1) -> int:
        """Elements of one layer on one rank, without its MLP and the norms around it."""
        matrices = hidden_size * (self.projected + self.inner_size) + self.width * self.n_channels
        return (matrices + 2 * self.n_value_heads) // tp_size + self.value_dim

    def state_bytes(self, itemsize: int, tp_size: int = 1) -> int:
        """What all layers remember of one row: matrices in float32, and inputs of the convolution."""
        matrices = 4 * self.n_value_heads * self.key_dim * self.value_dim
        return len(self.layers) * (matrices + itemsize * (self.width - 1) * self.n_channels) // tp_size

    @property
    def flops(self) -> float:
        """Of one token in all layers, forward: what its key reads, what is written, and what its query reads."""
        return 6.0 * len(self.layers) * self.n_value_heads * self.key_dim * self.value_dim
