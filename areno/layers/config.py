"""Descriptions of adapters, recurrent layers, experts and rotary embeddings, which a model's config holds.

This module imports no torch, so that planning and checks can read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ROW_MULTIPLE = 16  # the rows of a weight with A stacked below it are a multiple of this


@dataclass(frozen=True)
class AdapterSpec:
    """LoRA adapters (arXiv 2106.09685): W x becomes W x + scaling * B A x, with A (rank, I) and B (O, rank).

    Attributes:
        rank: the rank of A and B.
        alpha: scaling is alpha / rank.
        targets: the adapted modules by the last part of their names in the checkpoint, such as "q_proj".
        use_rslora: scaling is alpha / sqrt(rank) instead (arXiv 2312.03732).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Layers with the gated delta rule in place of attention; see `areno/kernels/delta`.

    Attributes:
        layers: the indices of these layers.
        n_key_heads: key heads, each shared by n_value_heads / n_key_heads value heads.
        n_value_heads: value heads.
        key_dim: the size of a key head.
        value_dim: the size of a value head.
        width: the width of the convolution.
    """

    layers: tuple[int, ...]
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def n_channels(self) -> int:
        """The channels of the convolution: q, k and v of all heads."""
        return 2 * self.n_key_heads * self.key_dim + self.inner_size

    @property
    def inner_size(self) -> int:
        """The size of the result, all value heads."""
        return self.n_value_heads * self.value_dim

    @property
    def projections(self) -> tuple[int, ...]:
        """The outputs of each part of the input projection: q, k and v, which are convolved, then z, b and a."""
        of_keys = self.n_key_heads * self.key_dim
        return (of_keys, of_keys, self.inner_size, self.inner_size, self.n_value_heads, self.n_value_heads)

    @property
    def projected(self) -> int:
        """The outputs of the input projection."""
        return sum(self.projections)

    def divided_parameters(self, hidden_size: int) -> int:
        """Return the parameters of one layer that ranks divide: all but its own norm, which has `value_dim`.

        The MLP of the layer and the norms around it are not counted.

        Args:
            hidden_size: the hidden size of the model.
        """
        matrices = hidden_size * (self.projected + self.inner_size) + self.width * self.n_channels
        return matrices + 2 * self.n_value_heads

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of the states of one row in all layers: float32 matrices, and inputs of the convolution.

        Args:
            itemsize: the bytes of an input of the convolution.
        """
        matrices = 4 * self.n_value_heads * self.key_dim * self.value_dim
        return len(self.layers) * (matrices + itemsize * (self.width - 1) * self.n_channels)

    @property
    def flops(self) -> float:
        """The FLOPs of one token in all layers, forward: reads by the key, writes, and reads by the query."""
        return 6.0 * len(self.layers) * self.n_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Layers whose MLP is a mixture of experts: a router chooses `top_k` of `n_experts` MLPs for each token.

    Attributes:
        n_experts: the number of experts.
        top_k: the experts of a token.
        inner_size: the inner size of each expert.
        normalised: divide the weights of the chosen experts by their sum. Otherwise a weight is the softmax over all
            experts.
        dense_layers: the layers that have one plain MLP instead.
        field: the field of config.json with the number of experts, for messages.
    """

    n_experts: int
    top_k: int
    inner_size: int
    normalised: bool
    dense_layers: frozenset[int] = frozenset()
    field: str = "num_experts"

    def layers(self, num_layers: int) -> list[int]:
        """Return the indices of the layers that have experts.

        Args:
            num_layers: the number of layers of the model.
        """
        return [index for index in range(num_layers) if index not in self.dense_layers]

    def parameters(self, hidden_size: int, n_experts: int) -> int:
        """Return the parameters of the router and of some experts in one layer.

        Args:
            hidden_size: the hidden size of the model.
            n_experts: the number of experts to count.
        """
        return hidden_size * (self.n_experts + 3 * self.inner_size * n_experts)

    def distinct(self, n_tokens: float) -> float:
        """Return the expected number of distinct experts of a layer, if tokens choose uniformly and independently.

        Args:
            n_tokens: the number of tokens.
        """
        return self.n_experts * (1.0 - (1.0 - self.top_k / self.n_experts) ** n_tokens)

    @property
    def id_bytes(self) -> int:
        """The bytes of an expert's index. The largest number of the type means no expert."""
        return 1 if self.n_experts < 2**8 else 2


@dataclass(frozen=True)
class Rope:
    """The frequencies of rotary position embedding, and their scaling beyond the context of pretraining.

    Kinds of scaling:
        linear: all frequencies are divided by `factor`.
        llama3: frequencies with wavelengths above original_max_positions / low_freq_factor are divided by `factor`,
            those with wavelengths below original_max_positions / high_freq_factor are kept, and those in between are
            interpolated.
        yarn (arXiv 2309.00071): frequencies with fewer than `beta_slow` turns within original_max_positions are divided
            by `factor`, those with more than `beta_fast` turns are kept, and those in between are interpolated, over a
            range of whole indices with `truncate`. Queries and keys are multiplied by `attention_factor`.
        dynamic: nothing changes up to max_position_embeddings. Beyond, frequencies would depend on the length of the
            text, so keys in a KV cache would differ from those of training. The model's context therefore ends there.
        longrope (arXiv 2402.13753): within original_max_positions, each frequency is divided by its own factor of
            `short_factors`, and queries and keys are multiplied by `attention_factor`. Beyond, all keys of a text would
            change, so the model's context ends there.
        none: no rotation.

    Attributes:
        theta: the base of the frequencies.
        kind: the kind of scaling.
        factor: the divisor of frequencies.
        low_freq_factor: of llama3.
        high_freq_factor: of llama3.
        original_max_positions: the context of pretraining.
        beta_fast: of yarn.
        beta_slow: of yarn.
        truncate: of yarn.
        attention_factor: of yarn and longrope.
        short_factors: of longrope.
        partial: the share of each head that is rotated.
        interleaved: the checkpoint pairs neighbouring numbers of a head; see `head_order` in rotary.py.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "none"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    partial: float = 1.0
    interleaved: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated.

        Args:
            head_dim: the size of a head.
        """
        return int(head_dim * self.partial)

    @property
    def limit(self) -> str:
        """Why the model's context ends early, for messages. Empty if the scaling does not limit it."""
        if self.kind == "longrope":
            return " (original_max_position_embeddings; longrope scaling beyond it is not supported)"
        if self.kind != "dynamic":
            return ""
        return " (max_position_embeddings; dynamic rope scaling beyond it is not supported)"
