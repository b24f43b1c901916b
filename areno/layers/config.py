"""Descriptions of adapters, recurrent layers, experts and rotary embeddings, which are fields of a model's config.

This module does not import torch, so that planning and checks can use the descriptions without loading it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ROW_MULTIPLE = 16  # a weight with a LoRA matrix A stacked below is padded to a multiple of this many rows


@dataclass(frozen=True)
class AdapterSpec:
    """LoRA adapters (arXiv 2106.09685): W x becomes W x + scaling * B A x.

    A has the shape (rank, input features), and B has the shape (output features, rank).

    Attributes:
        rank: the rank of A and B.
        alpha: the numerator of `scaling`, which is alpha / rank.
        targets: the adapted modules by the last part of their names in the checkpoint, such as "q_proj".
        use_rslora: whether scaling is alpha / sqrt(rank) instead (arXiv 2312.03732).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        """The factor that B A x is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Sizes of the layers that have the gated delta rule in place of attention; see `areno/kernels/delta`.

    Sizes are those of the whole model, before tensor parallelism divides the heads.

    Attributes:
        layers: the indices of the layers with the gated delta rule.
        n_key_heads: the number of key heads. Each is shared by n_value_heads / n_key_heads value heads.
        n_value_heads: the number of value heads.
        key_dim: the size of a key head. Query heads have the same number and size as key heads.
        value_dim: the size of a value head.
        width: the kernel size of the causal convolution over q, k and v, in tokens.
    """

    layers: tuple[int, ...]
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def n_channels(self) -> int:
        """The number of channels of the convolution: q, k and v of all heads."""
        return 2 * self.n_key_heads * self.key_dim + self.inner_size

    @property
    def inner_size(self) -> int:
        """The size of the result of the delta rule for one token: all value heads, side by side."""
        return self.n_value_heads * self.value_dim

    @property
    def projections(self) -> tuple[int, ...]:
        """The output sizes of the input projection: q, k and v, which are convolved, then z, b and a."""
        of_keys = self.n_key_heads * self.key_dim
        return (of_keys, of_keys, self.inner_size, self.inner_size, self.n_value_heads, self.n_value_heads)

    @property
    def projected(self) -> int:
        """The total output size of the input projection."""
        return sum(self.projections)

    def divided_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of one delta layer that tensor parallelism divides over the ranks.

        The norm of the heads (`value_dim` parameters) is not counted, because every rank has the whole norm. The MLP of
        the layer and the norms around it are not counted either.

        Args:
            hidden_size: the hidden size of the model.
        """
        matrices = hidden_size * (self.projected + self.inner_size) + self.width * self.n_channels
        return matrices + 2 * self.n_value_heads

    def state_bytes(self, itemsize: int) -> int:
        """Return the number of bytes of one sequence's recurrent states, in all delta layers together.

        A state consists of a float32 matrix for each value head and the last inputs of the convolution.

        Args:
            itemsize: the number of bytes of an element of the convolution's inputs.
        """
        matrices = 4 * self.n_value_heads * self.key_dim * self.value_dim
        return len(self.layers) * (matrices + itemsize * (self.width - 1) * self.n_channels)

    @property
    def flops(self) -> float:
        """The forward FLOPs of the delta rule for one token, in all delta layers.

        They count three operations: reading the state with the key, updating the state, and reading it with the query.
        Projections are not included.
        """
        return 6.0 * len(self.layers) * self.n_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Description of the layers whose MLP is a mixture of experts: a router chooses `top_k` experts for each token.

    Attributes:
        n_experts: the number of experts of a layer.
        top_k: the number of experts that each token uses.
        inner_size: the inner size of each expert.
        normalised: whether the weights of the chosen experts are divided by their sum. If False, the weight of an
            expert is its probability in the softmax over all experts.
        dense_layers: the indices of the layers that have a plain MLP instead of experts.
        field: the field of config.json that sets the number of experts, for error messages.
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
        """Return the number of parameters of the router and of some experts in one layer.

        Args:
            hidden_size: the hidden size of the model.
            n_experts: the number of experts to count.
        """
        return hidden_size * (self.n_experts + 3 * self.inner_size * n_experts)

    def distinct(self, n_tokens: float) -> float:
        """Return the expected number of distinct experts of a layer that a batch uses.

        The tokens are assumed to choose uniformly and independently.

        Args:
            n_tokens: the number of tokens of the batch.
        """
        return self.n_experts * (1.0 - (1.0 - self.top_k / self.n_experts) ** n_tokens)

    @property
    def id_bytes(self) -> int:
        """The number of bytes that store an expert index, 1 or 2.

        The largest value of the integer type means "no expert".
        """
        return 1 if self.n_experts < 2**8 else 2


@dataclass(frozen=True)
class Rope:
    """The frequencies of rotary position embedding, and their scaling for contexts longer than that of pretraining.

    Kinds of scaling:
        default: no scaling.
        linear: all frequencies are divided by `factor`.
        llama3: frequencies with wavelengths above original_max_positions / low_freq_factor are divided by `factor`,
            those with wavelengths below original_max_positions / high_freq_factor are kept, and those in between are
            interpolated.
        yarn (arXiv 2309.00071): frequencies with fewer than `beta_slow` turns within original_max_positions are divided
            by `factor`, those with more than `beta_fast` turns are kept, and those in between are interpolated. With
            `truncate`, the ends of the interpolated range are rounded outwards to whole indices. Queries and keys are
            multiplied by `attention_factor`.
        dynamic: nothing changes up to max_position_embeddings. For longer texts the frequencies would depend on the
            length of the text, so keys in a KV cache would differ from those of training. The model's context therefore
            ends at max_position_embeddings.
        longrope (arXiv 2402.13753): within original_max_positions, each frequency is divided by its own factor of
            `short_factors`, and queries and keys are multiplied by `attention_factor`. Longer texts would change all
            keys, so the model's context ends at original_max_positions.
        none: no rotation.

    Attributes:
        theta: the base of the frequencies.
        kind: the kind of scaling.
        factor: the divisor of frequencies for linear, llama3 and yarn.
        low_freq_factor: sets the longest wavelength that llama3 interpolates.
        high_freq_factor: sets the shortest wavelength that llama3 interpolates.
        original_max_positions: the context length of pretraining, in tokens.
        beta_fast: the number of turns above which yarn keeps a frequency.
        beta_slow: the number of turns below which yarn divides a frequency by `factor`.
        truncate: whether yarn rounds the ends of its interpolated range to whole indices.
        attention_factor: the factor of queries and keys, for yarn and longrope. Some model families set it for other
            kinds of scaling.
        short_factors: the divisor of each frequency, for longrope.
        partial: the fraction of each head's elements that is rotated.
        interleaved: whether the checkpoint rotates neighbouring elements of a head together, rather than elements half
            a head apart; see `head_order` in rotary.py.
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
        """Return the number of elements of a head that are rotated.

        Args:
            head_dim: the size of a head.
        """
        return int(head_dim * self.partial)

    @property
    def limit(self) -> str:
        """The reason why the scaling limits the model's context, for error messages.

        It is a text in parentheses that begins with a space, or an empty string if the scaling sets no limit.
        """
        if self.kind == "longrope":
            return " (original_max_position_embeddings; longrope scaling beyond it is not supported)"
        if self.kind != "dynamic":
            return ""
        return " (max_position_embeddings; dynamic rope scaling beyond it is not supported)"
