"""One layer of the transformer, its attention, and the choice of its MLP.

`attend` computes attention over packed rows or over a KV cache. `cos` and `sin` (together `angles`) come from the
rotary embedding, (N, 1, C / 2) float32. If `split` is true (sequence parallelism), inputs and outputs hold only this
rank's share of the N tokens.

Shapes: N tokens, D hidden size, C head dimension. On one rank: H query heads, K key heads, Q = H * C the width of the
queries, P = K * C the width of the keys, X the output width of the fused projection of queries, keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from areno.kernels.fp8 import round_rows_straight_through
from areno.layers.attention import Attend, AttentionLayer
from areno.layers.delta import GatedDelta
from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.mlp import ExpertMLP, GatedMLP
from areno.layers.norm import RMSNorm, ShardedRMSNorm
from areno.layers.rotary import rotate
from areno.layers.routing import Routing
from areno.layers.shard import Layout, TensorPart, WeightSpec
from areno.models.config import TransformerConfig


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding.

    With `config.attention_gate`, the qkv projection computes a gate next to the query of each head. The head's output
    is multiplied by the sigmoid of the gate.

    Attributes:
        index: the index among the layers with attention.
        fp8_kv: see TransformerConfig.
        sizes: the widths of all queries, all keys and all values of one token on this rank, without gates.
        q_norm: the norm of queries: an RMSNorm of each head, a ShardedRMSNorm of all heads together, or None.
        k_norm: the norm of keys, of the same type as `q_norm`.
        sinks: the sinks of this rank's query heads, see `areno.kernels.sinks`, or None.
    """

    def __init__(self, config: TransformerConfig, index: int, spec: WeightSpec):
        super().__init__()
        self.index, self.window = config.attention_layers.index(index), config.layer_kind(index).window
        self.head_dim, self.gated, self.fp8_kv = config.head_dim, config.attention_gate, config.fp8_kv
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        copies = max(1, spec.tp.size // config.num_kv_heads)  # the number of ranks that hold each key-value head
        outputs = (q_size * (1 + self.gated), kv_size, kv_size)
        self.qkv = ColumnParallelLinear(
            config.hidden_size, outputs, spec, bias=config.qkv_bias, copies=(1, copies, copies)
        )
        kv_local = self.qkv.local_sizes[1]
        self.sizes = (self.qkv.local_sizes[0] // (1 + self.gated), kv_local, kv_local)
        self.sinks, self.layout = None, Layout()
        if config.attention_sinks:
            local = self.sizes[0] // config.head_dim
            self.sinks = spec.empty(local)
            self.layout["sinks"] = (TensorPart((config.num_heads,), dim=0, start=spec.tp.rank * local, size=local),)
        self.q_norm = self.k_norm = None
        if config.qk_norm_whole:
            assert not self.gated, "fused layers lack the norm of all heads together with gates"
            self.q_norm = ShardedRMSNorm(q_size, config.rms_norm_eps, spec)
            self.k_norm = ShardedRMSNorm(kv_size, config.rms_norm_eps, spec)
        elif config.qk_norm:
            eps, plus_one = config.rms_norm_eps, config.norm_plus_one
            self.q_norm = RMSNorm(config.head_dim, eps, spec, own_data=True, plus_one=plus_one)
            self.k_norm = RMSNorm(config.head_dim, eps, spec, own_data=True, plus_one=plus_one)
        self.out = RowParallelLinear(q_size, config.hidden_size, spec, bias=config.o_bias)

    def forward(self, x_ND: Tensor, cos: Tensor, sin: Tensor, attend: Attend, split: bool = False) -> Tensor:
        qkv_NX, gate_NQ = self.split_gate(self.qkv(x_ND, split))
        heads_NJC = self.norm_all_heads(qkv_NX).unflatten(-1, (-1, self.head_dim))
        n_q, n_kv = self.sizes[0] // self.head_dim, self.sizes[1] // self.head_dim
        if torch.is_grad_enabled() or not heads_NJC.is_cpu or heads_NJC.dtype != torch.float32:
            q_NHC, k_NKC, v_NKC = heads_NJC.split((n_q, n_kv, n_kv), dim=1)
            if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
                q_NHC, k_NKC = self.q_norm(q_NHC), self.k_norm(k_NKC)
            q_NHC, k_NKC = rotate(q_NHC, cos, sin), rotate(k_NKC, cos, sin)
        else:  # queries and keys together: half as many operations, which take most of the time of a tiny model
            qk_NJC, v_NKC = heads_NJC.split((n_q + n_kv, n_kv), dim=1)
            if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
                qk_NJC = self.q_norm.norm_heads_with(self.k_norm, qk_NJC, n_q)
            q_NHC, k_NKC = rotate(qk_NJC, cos, sin).split((n_q, n_kv), dim=1)
        if self.fp8_kv:
            k_NKC, v_NKC = round_rows_straight_through(k_NKC), round_rows_straight_through(v_NKC)
        out_NHC = attend(self.as_layer, q_NHC, k_NKC, v_NKC)
        return self.out(self.gate(out_NHC.flatten(-2), gate_NQ), split)

    @property
    def as_layer(self) -> AttentionLayer:
        return AttentionLayer(self.index, self.window, self.sinks)

    def split_gate(self, qkv_NX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the output of the qkv projection into (queries, keys and values) and the gate (None without gates)."""
        if not self.gated:
            return qkv_NX, None
        both_NQ2, keys_values = qkv_NX.tensor_split((2 * self.sizes[0],), dim=-1)
        q_NHC, gate_NHC = both_NQ2.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        return torch.cat((q_NHC.flatten(-2), keys_values), dim=-1), gate_NHC.flatten(-2)

    @staticmethod
    def gate(out_NQ: Tensor, gate_NQ: Tensor | None) -> Tensor:
        return out_NQ if gate_NQ is None else out_NQ * torch.sigmoid(gate_NQ)

    def norm_all_heads(self, qkv_NX: Tensor) -> Tensor:
        """Normalise the queries of all heads together, and the keys likewise, if the family has such norms."""
        if not isinstance(self.q_norm, ShardedRMSNorm) or not isinstance(self.k_norm, ShardedRMSNorm):
            return qkv_NX
        q_NQ, k_NP, v_NP = qkv_NX.split(self.sizes, dim=-1)
        return torch.cat((self.q_norm(q_NQ), self.k_norm(k_NP), v_NP), dim=-1)

    def norm_all_heads_backward(self, grad_NX: Tensor, qkv_NX: Tensor) -> Tensor:
        """Return the gradient with respect to the input of `norm_all_heads`. Adds the weights' gradients to `.grad`."""
        if not isinstance(self.q_norm, ShardedRMSNorm) or not isinstance(self.k_norm, ShardedRMSNorm):
            return grad_NX
        q_NQ, k_NP, _ = qkv_NX.split(self.sizes, dim=-1)
        grad_q, grad_k, grad_v = grad_NX.split(self.sizes, dim=-1)
        return torch.cat((self.q_norm.backward(grad_q, q_NQ), self.k_norm.backward(grad_k, k_NP), grad_v), dim=-1)


def make_mlp(config: TransformerConfig, index: int, spec: WeightSpec, routing: Routing | None) -> GatedMLP | ExpertMLP:
    experts = config.experts
    if experts is not None and routing is not None and index not in experts.dense_layers:
        place = experts.layers(config.num_layers).index(index)
        return ExpertMLP(config.hidden_size, experts, place, routing, spec)
    return GatedMLP(
        config.hidden_size, config.intermediate_size, spec, bias=config.mlp_bias, gelu=config.activation == "gelu_tanh"
    )


class Layer(nn.Module):
    """A transformer layer: attention and an MLP, each followed by a residual addition.

    Norms are before attention and MLP, after them, or both; absent norms are None. A layer with a recurrent state has
    `delta` in place of `attention`. All layers with experts share one `routing`.
    """

    def __init__(self, config: TransformerConfig, index: int, spec: WeightSpec, routing: Routing | None):
        super().__init__()

        def norm(*where: str) -> RMSNorm | None:
            if config.norms not in where:
                return None
            return RMSNorm(config.hidden_size, config.rms_norm_eps, spec, plus_one=config.norm_plus_one)

        self.input_norm = norm("before", "both")
        self.attention = self.delta = None
        if config.delta is not None and index in config.delta.layers:
            place = config.delta.layers.index(index)
            self.delta = GatedDelta(config.hidden_size, config.delta, place, config.rms_norm_eps, spec)
        else:
            self.attention = Attention(config, index, spec)
        self.post_attention_norm = norm("after", "both")
        self.pre_mlp_norm = norm("before", "both")
        self.mlp = make_mlp(config, index, spec, routing)
        self.post_mlp_norm = norm("after", "both")

    def forward(self, x_ND: Tensor, cos: Tensor, sin: Tensor, attend: Attend, split: bool = False) -> Tensor:
        """Return the residual stream after this layer. Uses autograd and no fused kernels."""
        y_ND = self._mix_tokens(x_ND if self.input_norm is None else self.input_norm(x_ND), cos, sin, attend, split)
        x_ND = x_ND + (y_ND if self.post_attention_norm is None else self.post_attention_norm(y_ND))
        y_ND = self.mlp(x_ND if self.pre_mlp_norm is None else self.pre_mlp_norm(x_ND), split)
        return x_ND + (y_ND if self.post_mlp_norm is None else self.post_mlp_norm(y_ND))

    @property
    def dtype(self) -> torch.dtype:
        module = self.attention or self.delta
        assert module is not None
        return module.out.weight.dtype

    def _mix_tokens(self, x_ND: Tensor, cos: Tensor, sin: Tensor, attend: Attend, split: bool) -> Tensor:
        """Return the output of attention or, in a layer with a recurrent state, of the gated delta rule."""
        if self.attention is not None:
            return self.attention(x_ND, cos, sin, attend, split)
        assert self.delta is not None
        return self.delta(x_ND, attend, split)
