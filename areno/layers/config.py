"""Which adapters a model has, without its weights. Imports no torch.

The description of layers with a recurrent state, without torch: a model's config holds one.

The description of a model's experts, without torch: a model's config holds one.

The description of rotary position embeddings, without torch: a model's config holds one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ROW_MULTIPLE = 16  # of a weight with a copy of A below it, and so of the columns of the product that gives both


@dataclass(frozen=True)
class AdapterSpec:
    """Low-rank adapters (LoRA, arXiv 2106.09685): W x becomes W x + scaling * B A x, with A (rank, I) and B (O, rank).

    targets: the last part of the checkpoint's names of the adapted modules, such as "q_proj". use_rslora: scaling is
    alpha / sqrt(rank) (arXiv 2312.03732) and not alpha / rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


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

    def divided_parameters(self, hidden_size: int) -> int:
        """Return the elements of one layer that ranks divide, which are all but the norm of `value_dim` elements.

        The MLP of the layer and the norms around it are not counted.
        """
        matrices = hidden_size * (self.projected + self.inner_size) + self.width * self.n_channels
        return matrices + 2 * self.n_value_heads

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of all layers' states of one row: matrices in float32, and inputs of the convolution."""
        matrices = 4 * self.n_value_heads * self.key_dim * self.value_dim
        return len(self.layers) * (matrices + itemsize * (self.width - 1) * self.n_channels)

    @property
    def flops(self) -> float:
        """Of one token in all layers, forward: what its key reads, what is written, and what its query reads."""
        return 6.0 * len(self.layers) * self.n_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Layers whose MLP is a mixture of experts: a router chooses `top_k` of `n_experts` MLPs for each token.

    inner_size: of each expert. normalised: the weights of the chosen experts add up to 1; otherwise they are their
    shares of the softmax over all experts. dense_layers: the layers that have one plain MLP instead.
    field: what config.json calls the number of experts, for messages.
    """

    n_experts: int
    top_k: int
    inner_size: int
    normalised: bool
    dense_layers: frozenset[int] = frozenset()
    field: str = "num_experts"

    def layers(self, num_layers: int) -> list[int]:
        """Those of a model's layers that have experts."""
        return [index for index in range(num_layers) if index not in self.dense_layers]

    def parameters(self, hidden_size: int, n_experts: int) -> int:
        """Elements of the router and of so many experts, in one layer."""
        return hidden_size * (self.n_experts + 3 * self.inner_size * n_experts)

    def distinct(self, n_tokens: float) -> float:
        """How many experts a layer needs for so many tokens that choose evenly and by themselves, on average."""
        return self.n_experts * (1.0 - (1.0 - self.top_k / self.n_experts) ** n_tokens)

    @property
    def id_bytes(self) -> int:
        """Bytes in which the number of an expert is kept. The largest number of the type stands for none."""
        return 1 if self.n_experts < 2**8 else 2


@dataclass(frozen=True)
class Rope:
    """Base of the frequencies, and how they are stretched to reach beyond the context of the first training.

    linear: all frequencies are divided by `factor`.
    llama3: wavelengths above original_max_positions / low_freq_factor are stretched by `factor`, wavelengths below
    original_max_positions / high_freq_factor are kept, and those between are interpolated.
    yarn (arXiv 2309.00071): frequencies that turn less than `beta_slow` times within original_max_positions are divided
    by `factor`, those that turn more than `beta_fast` times are kept, and those between are interpolated, over a range
    of whole frequencies with `truncate`. Queries and keys are multiplied by `attention_factor`.
    dynamic: nothing changes up to max_position_embeddings. Beyond, the frequencies would depend on the length of the
    text. A KV cache holds keys that were turned at shorter lengths, so decoding and training could not agree there:
    the model's context ends at max_position_embeddings.
    longrope (arXiv 2402.13753): within original_max_positions, each frequency is divided by its own one of
    `short_factors`, and queries and keys are multiplied by `attention_factor`. Beyond, all of a text's keys would be
    turned in another way, so the model's context ends there, as with dynamic.
    none: no rotation at all.

    partial: the share of each head that is rotated; the rest of it knows no position.
    interleaved: in the checkpoint, numbers that are rotated together are neighbours; see `head_order` in rotary.py.
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
        """How many numbers of a head are rotated."""
        return int(head_dim * self.partial)

    @property
    def limit(self) -> str:
        """For messages about the model's context: why it ends where it does. Empty where it is just its size."""
        if self.kind == "longrope":
            return " (original_max_position_embeddings; longrope scaling beyond it is not supported)"
        if self.kind != "dynamic":
            return ""
        return " (max_position_embeddings; dynamic rope scaling beyond it is not supported)"
