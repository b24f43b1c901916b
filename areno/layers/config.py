"""Descriptions of adapters, recurrent layers, experts and rotary embeddings, which are fields of a model's config.

This module does not import torch, so that planning and checks can use the descriptions without loading it. Sizes are
those of the whole model, before tensor parallelism divides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MLP_PIECE = 3 * 2**28  # outputs of gate and up that an MLP computes at once: 1.5 GiB in bf16
ROW_MULTIPLE = 16  # a weight with a LoRA matrix A stacked below is padded to a multiple of this many rows


def mlp_piece_tokens(n_outputs: int) -> int:
    """Return for how many tokens an MLP computes `n_outputs` outputs of gate and up at once."""
    return max(1, MLP_PIECE // n_outputs)


@dataclass(frozen=True)
class AdapterSpec:
    """LoRA adapters (arXiv 2106.09685): W x becomes W x + scaling * B A x. A is (rank, inputs), B (outputs, rank)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last parts of names in the checkpoint, such as "q_proj"
    use_rslora: bool = False  # scaling is alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Sizes of the layers that have the gated delta rule in place of attention; see `areno/kernels/delta`."""

    layers: tuple[int, ...]  # indices
    n_key_heads: int  # each is shared by n_value_heads / n_key_heads value heads
    n_value_heads: int
    key_dim: int  # query heads have the same number and size as key heads
    value_dim: int
    width: int  # of the causal convolution over q, k and v, in tokens

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.n_key_heads * self.key_dim + self.inner_size

    @property
    def inner_size(self) -> int:
        """Number of outputs of the delta rule for one token: all value heads, side by side."""
        return self.n_value_heads * self.value_dim

    @property
    def projection_sizes(self) -> tuple[int, ...]:
        """Output sizes of the input projection: q, k, v, z, b and a. The convolution reads q, k and v."""
        of_keys = self.n_key_heads * self.key_dim
        return (of_keys, of_keys, self.inner_size, self.inner_size, self.n_value_heads, self.n_value_heads)

    @property
    def projected_size(self) -> int:
        return sum(self.projection_sizes)

    def n_sharded_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of one delta layer that tensor parallelism divides over the ranks.

        Not counted are the norm of the heads, which every rank has in full, and the MLP and its norms.
        """
        matrices = hidden_size * (self.projected_size + self.inner_size) + self.width * self.n_channels
        return matrices + 2 * self.n_value_heads

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's states: fp32 matrices, and convolution inputs of `itemsize` bytes each."""
        matrices = 4 * self.n_value_heads * self.key_dim * self.value_dim
        return len(self.layers) * (matrices + itemsize * (self.width - 1) * self.n_channels)

    @property
    def flops(self) -> float:
        """Forward FLOPs of the delta rule for one token, in all delta layers, without projections.

        Three operations count: reading the state with the key, updating the state, and reading it with the query.
        """
        return 6.0 * len(self.layers) * self.n_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class ClampedGLU:
    """The activation (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within +-`limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The layers whose MLP is a mixture of experts: a router chooses `top_k` experts for each token."""

    n_experts: int
    top_k: int
    inner_size: int
    normalised: bool  # whether a token's weights, its scores of the chosen experts, are divided by their sum
    sigmoid: bool = False  # scores are sigmoids, not a softmax over all experts, and the choice adds a bias to them
    n_groups: int = 1  # neighbouring experts form groups of one size, of which a token uses `top_groups`
    top_groups: int = 1  # the groups with the largest sums of their two largest scores for the choice
    scale: float = 1.0  # of the weights
    shared_size: int = 0  # inner size of the shared expert, which every token uses; 0 if there is none
    shared_field: str = "shared_expert_intermediate_size"  # of config.json, for error messages
    shared_gated: bool = False  # whether the output of the shared expert is multiplied by the sigmoid of a gate
    dense_layers: frozenset[int] = frozenset()  # indices of the layers that have a plain MLP instead
    biased: bool = False  # router and experts have biases
    clamped: ClampedGLU | None = None  # the experts' activation; the rows of gate and up then alternate. None: SwiGLU
    field: str = "num_experts"  # of config.json, for error messages

    def layers(self, num_layers: int) -> list[int]:
        return [index for index in range(num_layers) if index not in self.dense_layers]

    def n_parameters(self, hidden_size: int, n_experts: int) -> int:
        """Return the number of parameters of the router, the gate, biases and `n_experts` experts in one layer.

        The shared expert is not counted, because tensor parallelism divides its inner size.
        """
        of_inputs = self.n_experts + self.shared_gated + 3 * self.inner_size * n_experts
        of_biases = self.n_experts + n_experts * (2 * self.inner_size + hidden_size) if self.biased else 0
        return hidden_size * of_inputs + self.n_experts * self.sigmoid + of_biases

    def expected_distinct(self, n_tokens: float) -> float:
        """Return the expected number of experts that `n_tokens` tokens use together, if they choose at random."""
        return self.n_experts * (1.0 - (1.0 - self.top_k / self.n_experts) ** n_tokens)

    @property
    def id_bytes(self) -> int:
        """Bytes of a recorded expert index, 1 or 2. The largest value of that size means "no expert"."""
        return 1 if self.n_experts < 2**8 else 2


@dataclass(frozen=True)
class RopeConfig:
    """The frequencies of rotary position embedding, and their scaling for contexts longer than in pretraining.

    Kinds of scaling:
        default: no scaling.
        linear: all frequencies are divided by `factor`.
        llama3: frequencies with wavelengths above original_max_positions / low_freq_factor are divided by `factor`,
            those with wavelengths below original_max_positions / high_freq_factor are kept, and those in between are
            interpolated.
        yarn (arXiv 2309.00071): frequencies with fewer than `beta_slow` turns in original_max_positions are divided by
            `factor`, those with more than `beta_fast` turns are kept, and those in between are interpolated. With
            `truncate`, the ends of the interpolated range are rounded outwards to whole indices. Queries and keys are
            multiplied by `attention_factor`.
        dynamic: nothing changes up to max_position_embeddings. For longer texts the frequencies would depend on their
            length, so keys in a KV cache would differ from those of training. The model's context therefore ends at
            max_position_embeddings.
        longrope (arXiv 2402.13753): within original_max_positions, each frequency is divided by its own factor of
            `short_factors`, and queries and keys are multiplied by `attention_factor`. Longer texts would change all
            keys, so the model's context ends at original_max_positions.
        none: no rotation.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "none"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192  # context length of pretraining
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # some model families set it for other kinds, too
    short_factors: tuple[float, ...] = ()
    partial: float = 1.0  # fraction of each head's elements that is rotated
    interleaved: bool = False  # the checkpoint rotates neighbouring elements together, see `head_order` in rotary.py

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial)

    @property
    def limit_note(self) -> str:
        """Why the scaling limits the context of the model, as text " (...)" for messages. "" if it sets no limit."""
        if self.kind == "longrope":
            return " (original_max_position_embeddings; longrope scaling beyond it is not supported)"
        if self.kind != "dynamic":
            return ""
        return " (max_position_embeddings; dynamic rope scaling beyond it is not supported)"
