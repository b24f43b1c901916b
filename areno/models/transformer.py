"""The decoder-only transformer all families share: pre-norm, rotary positions, grouped heads, gated MLP.

Rows are packed end to end; which tokens see which is decided by `attend`, so the same model trains and decodes.
Shape letters: N tokens, D hidden size, H query heads, K key heads, C head dimension, V vocabulary; H, K and V are this
rank's share under tensor parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from areno.layers.attention import Attend
from areno.layers.embedding import VocabParallelEmbedding
from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.norm import RMSNorm
from areno.layers.parallel import TensorParallel
from areno.layers.rotary import Rotary, rotate
from areno.layers.shard import Part
from areno.layers.value_head import ValueHead
from areno.models.config import TransformerConfig
from areno.models.family import Family
from areno.models.fused import fused_layer, fused_norm, kernels_for


class Attention(nn.Module):
    """Grouped-query attention with rope; the keys of all tokens are the business of `attend`."""

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = ColumnParallelLinear(
            config.hidden_size, (q_size, kv_size, kv_size), bias=config.qkv_bias, tp=tp, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device, tp=tp)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device, tp=tp)
        self.out = RowParallelLinear(q_size, config.hidden_size, bias=config.o_bias, tp=tp, dtype=dtype, device=device)

    def forward(self, x_ND: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        parts = self.qkv(x_ND).split(self.qkv.local_sizes, dim=-1)
        q_NHC, k_NKC, v_NKC = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHC, k_NKC = self.q_norm(q_NHC), self.k_norm(k_NKC)
        out_NHC = attend(self.index, rotate(q_NHC, cos, sin), rotate(k_NKC, cos, sin), v_NKC)
        return self.out(out_NHC.flatten(-2))


class MLP(nn.Module):
    """down(silu(gate x) * up x), arXiv 2002.05202."""

    def __init__(
        self, config: TransformerConfig, *, tp: TensorParallel, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = ColumnParallelLinear(hidden, (inner, inner), bias=bias, tp=tp, dtype=dtype, device=device)
        self.down = RowParallelLinear(inner, hidden, bias=bias, tp=tp, dtype=dtype, device=device)

    def forward(self, x_ND: Tensor) -> Tensor:
        gate, up = self.gate_up(x_ND).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(config, index, tp=tp, dtype=dtype, device=device)
        self.post_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, tp=tp, dtype=dtype, device=device)

    def forward(self, x_ND: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x_ND = x_ND + self.attention(self.input_norm(x_ND), cos, sin, attend)
        return x_ND + self.mlp(self.post_norm(x_ND))


class Transformer(nn.Module):
    """Parameters come in a fixed order, may be replaced by views of a flat buffer (`parameter.data = view`), and a tied
    embedding is one parameter. Norm weights and biases have one dimension, matrices two.
    """

    def __init__(
        self,
        config: TransformerConfig,
        family: Family,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tp: TensorParallel,
    ):
        super().__init__()
        self.config = config
        self.family = family
        self.tp = tp
        vocab, size = config.vocab_size, config.hidden_size
        self.embed = VocabParallelEmbedding(vocab, size, tp=tp, dtype=dtype, device=device)
        self.rotary = Rotary(config.rope, config.head_dim, device=device)
        self.layers = nn.ModuleList(
            Layer(config, index, tp=tp, dtype=dtype, device=device) for index in range(config.num_layers)
        )
        self.final_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = self.score = None
        if config.head == "value":
            self.score = ValueHead(size, dtype=dtype, device=device)
        elif not config.tie_word_embeddings:
            self.head = VocabParallelEmbedding(vocab, size, tp=tp, dtype=dtype, device=device)

    def forward(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, recompute: bool = False, n_kept: int = 0
    ) -> Tensor:
        """Hidden states after the final norm, (N, D), the same on every rank.

        tokens_N, positions_N: int64; positions count from 0 in each row.
        recompute: keep little of each layer for the backward pass and compute the rest again; not so the last `n_kept`
        layers.
        """
        cos, sin = self.rotary(positions_N)
        x_ND = self.embed(tokens_N)
        n_recomputed = max(0, len(self.layers) - n_kept) if recompute else 0
        if kernels_for(self, x_ND, attend):
            x_ND, delta_ND = x_ND.float(), None
            for index, layer in enumerate(self.layers):
                keep = index >= n_recomputed
                x_ND, delta_ND = fused_layer(layer, x_ND, delta_ND, cos, sin, attend, keep)  # type: ignore[arg-type]
            assert delta_ND is not None, "a model without layers"
            return fused_norm(self.final_norm, x_ND, delta_ND)
        for index, layer in enumerate(self.layers):
            if index < n_recomputed and torch.is_grad_enabled():
                x_ND = checkpoint(layer, x_ND, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x_ND = layer(x_ND, cos, sin, attend)
        return self.final_norm(x_ND)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def output(self) -> VocabParallelEmbedding:
        """The vocabulary matrix of an "lm" head: the embedding itself when tied."""
        assert self.score is None, "a value model has no vocabulary head"
        return self.embed if self.head is None else self.head

    @property
    def head_weight(self) -> Tensor:
        """(V_local, D) parameter: the rows of the vocabulary on this rank, from `rank * ceil(vocab_size / tp_size)` on.

        Rows below `vocab_size` are padding, zero and not part of any softmax.
        """
        return self.output.weight

    def logits(self, hidden_KD: Tensor) -> Tensor:
        """(K, vocab_size) float32, gathered over the ranks; without gradient when there are several."""
        return self.output.logits(hidden_KD)

    def values(self, hidden_KD: Tensor) -> Tensor:
        """(K,) float32, the output of a "value" head."""
        assert self.score is not None, "a language model has no value head"
        return self.score(hidden_KD)

    def layout(self, parameter: str) -> tuple[Part, ...]:
        """The checkpoint tensors that the named parameter holds, from the first row down."""
        layer, kind = parameter.rsplit(".", 1)
        return self.get_submodule(layer).layout[kind]  # type: ignore[return-value, index]

    def is_sharded(self, parameter: str) -> bool:
        """Whether the ranks hold different pieces of the named parameter, rather than equal copies."""
        return self.tp.size > 1 and self.layout(parameter)[0].dim is not None

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices normal with the config's `initializer_range`, norms 1, biases and a value head 0.

        The full tensors are a function of the seed (and the device type), whatever the number of ranks.
        """
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, VocabParallelEmbedding):
                module.clear_padding()
            elif isinstance(module, ValueHead):
                module.weight.zero_()
        device = self.device
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 2 and name != "score.weight":
                for part in self.layout(name):
                    full = torch.empty(part.full_shape, dtype=torch.float32, device=device)
                    full.normal_(0.0, self.config.initializer_range, generator=generator)
                    part.region(parameter).copy_(part.cut(full))
