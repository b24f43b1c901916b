"""A layer with the gated delta rule in place of attention. Each tensor-parallel rank has some of the heads.

Shape letters as in `areno.kernels.delta`, for the heads of this rank; D hidden size, I = H V.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from areno.kernels.delta import DeltaWeights
from areno.layers.attention import PackedAttend
from areno.layers.config import DeltaConfig
from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.norm import RMSNorm
from areno.layers.shard import Layout, TensorPart, WeightSpec, stacked_parts


class RowConvolution(nn.Module):
    """The weight of the depthwise convolution over stacked q, k and v: (X, 1, W), as in checkpoints."""

    def __init__(self, out_sizes: tuple[int, ...], width: int, spec: WeightSpec):
        super().__init__()
        local_sizes = [spec.tp.shard_size(size, "channels of a convolution") for size in out_sizes]
        self.weight = spec.empty(sum(local_sizes), 1, width)
        shapes = [(size, 1, width) for size in out_sizes]
        self.layout: Layout = {"weight": stacked_parts(shapes, local_sizes, spec.tp, [1] * len(shapes))}


class GatedDelta(nn.Module):
    """Computes out(norm(delta_rule(conv(q, k, v), b, a)) * silu(z)), where one layer projects x to q, k, v, z, b, a.

    `index` counts only the layers with a recurrent state.
    """

    def __init__(self, hidden_size: int, delta: DeltaConfig, index: int, eps: float, spec: WeightSpec):
        super().__init__()
        self.index, self.delta = index, delta
        self.n_key_heads = spec.tp.shard_size(delta.n_key_heads, "key heads")
        heads, inner = delta.n_value_heads, delta.inner_size
        self.in_proj = ColumnParallelLinear(hidden_size, delta.projection_sizes, spec, bias=False)
        self.conv = RowConvolution(delta.projection_sizes[:3], delta.width, spec)
        local = spec.tp.shard_size(heads, "value heads")
        self.A_log, self.dt_bias = spec.empty(local), spec.empty(local)  # the names in checkpoints
        part = TensorPart((heads,), dim=0, start=spec.tp.rank * local, size=local)
        self.layout: Layout = {"A_log": (part,), "dt_bias": (part,)}
        self.norm = RMSNorm(delta.value_dim, eps, spec, own_data=True)
        self.out = RowParallelLinear(inner, hidden_size, spec, bias=False)

    def forward(self, x_ND: Tensor, attend: Any, split: bool = False) -> Tensor:
        """Return the output, with autograd. `attend.recur` computes the delta rule. `split`: sequence parallelism."""
        norm_V = self.norm.tp.copy_in(self.norm.weight)
        return self.out(self.delta_rule(self.in_proj(x_ND, split), attend, self.weights(norm_V)), split)

    def weights(self, norm_V: Tensor) -> DeltaWeights:
        """Return the weights for the kernels. `norm_V`: the norm's weight, after `copy_in` if autograd is used."""
        conv_XW = self.conv.weight.squeeze(1)
        return DeltaWeights(conv_XW, self.A_log, self.dt_bias, norm_V, self.norm.eps, self.n_key_heads)

    def delta_rule(self, proj_NP: Tensor, attend: Any, weights: DeltaWeights) -> Tensor:
        """Return the result of the delta rule, (N, I), which is the input of the output projection."""
        return attend.recur(self.index, proj_NP, weights)

    def delta_rule_backward(self, grad_NI: Tensor, proj_NP: Tensor, attend: PackedAttend) -> Tensor:
        """Return the gradient with respect to `proj_NP`, and add the weights' gradients to `.grad`."""
        own = [self.conv.weight, self.A_log, self.dt_bias, self.norm.weight]
        of_weights = any(weight.requires_grad for weight in own)
        grad_proj_NP, found = attend.recur_backward(grad_NI, proj_NP, self.weights(self.norm.weight), of_weights)
        for weight, grad in zip(own, found or (), strict=of_weights):
            if weight is self.norm.weight:
                self.norm.accumulate_grad(grad)
            elif weight.requires_grad:
                assert weight.grad is not None
                weight.grad.add_(grad.view(weight.shape))
        return grad_proj_NP
