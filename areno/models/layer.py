"""One layer of the transformer, and its attention. Shape letters as in `transformer.py`."""

from __future__ import annotations

from torch import Tensor, nn

from areno.layers.attention import Attend
from areno.layers.experts import ExpertMLP
from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.mlp import GatedMLP
from areno.layers.norm import RMSNorm
from areno.layers.rotary import rotate
from areno.layers.routing import Routing
from areno.layers.shard import WeightSpec
from areno.models.config import TransformerConfig


class Attention(nn.Module):
    """Grouped-query attention with rope; the keys of all tokens are the business of `attend`."""

    def __init__(self, config: TransformerConfig, index: int, spec: WeightSpec):
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        copies = max(1, spec.tp.size // config.num_kv_heads)  # of each key-value head
        self.qkv = ColumnParallelLinear(
            config.hidden_size, (q_size, kv_size, kv_size), spec, bias=config.qkv_bias, copies=(1, copies, copies)
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, spec, own_data=True)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, spec, own_data=True)
        self.out = RowParallelLinear(q_size, config.hidden_size, spec, bias=config.o_bias)

    def forward(self, x_ND: Tensor, cos: Tensor, sin: Tensor, attend: Attend, split: bool = False) -> Tensor:
        parts = self.qkv(x_ND, split).split(self.qkv.local_sizes, dim=-1)
        q_NHC, k_NKC, v_NKC = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHC, k_NKC = self.q_norm(q_NHC), self.k_norm(k_NKC)
        out_NHC = attend(self.index, rotate(q_NHC, cos, sin), rotate(k_NKC, cos, sin), v_NKC)
        return self.out(out_NHC.flatten(-2), split)


def make_mlp(config: TransformerConfig, index: int, spec: WeightSpec, routing: Routing | None) -> GatedMLP | ExpertMLP:
    """The MLP of a layer; the one place that knows which kinds there are."""
    experts = config.experts
    if experts is not None and routing is not None and index not in experts.dense_layers:
        place = experts.layers(config.num_layers).index(index)
        return ExpertMLP(config.hidden_size, experts, place, routing, spec)
    return GatedMLP(config.hidden_size, config.intermediate_size, spec, bias=config.mlp_bias)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream.

    split: tensor-parallel ranks have a share of the residual stream's tokens each. Attention sees all of them.
    """

    def __init__(self, config: TransformerConfig, index: int, spec: WeightSpec, routing: Routing | None = None):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, spec)
        self.attention = Attention(config, index, spec)
        self.post_norm = RMSNorm(size, eps, spec)
        self.mlp = make_mlp(config, index, spec, routing)

    def forward(self, x_ND: Tensor, cos: Tensor, sin: Tensor, attend: Attend, split: bool = False) -> Tensor:
        x_ND = x_ND + self.attention(self.input_norm(x_ND), cos, sin, attend, split)
        return x_ND + self.mlp(self.post_norm(x_ND), split)
