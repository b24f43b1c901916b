"""A layer as one step of autograd: fused kernels between the matrix products, and a backward pass written out.

Against the plain layer this saves three things. Nothing elementwise is kept for the backward pass, since the kernels
compute it again on the way. Under recompute, attention and the two products whose results the backward pass does not
need (attention's output and the MLP's `down`) are not computed a second time. And weight gradients are accumulated in
the fp32 gradient buffer by the matrix products themselves.

The residual stream is float32 whatever the dtype of the weights. Rounding it to bf16 after each addition is the largest
single source of error in a log-probability, and so of disagreement between rollout and training.

Shape letters as in `transformer.py`; X = (H + 2 K) C outputs of the qkv projection, I inner size of the MLP.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.fused import fused_kernels
from areno.kernels.matmul import add_product
from areno.layers.attention import Attend, PackedAttend
from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.norm import RMSNorm

if TYPE_CHECKING:
    from areno.models.transformer import Layer


def kernels_for(model: nn.Module, x_ND: Tensor, attend: Attend) -> ModuleType | None:
    """The fused kernels, if this model can run on them as things are; else the plain layers have to.

    With gradients it needs buffers to accumulate them in, and attention with a backward pass that can be called.
    """
    kernels = fused_kernels(x_ND)
    if kernels is None or not torch.is_grad_enabled():
        return kernels
    buffered = all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return kernels if buffered and isinstance(attend, PackedAttend) else None


def fused_layer(
    layer: Layer,
    stream_ND: Tensor,
    delta_ND: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The layer on the residual stream + delta: the stream as the MLP saw it, and what the MLP adds to that.

    The sum is left to the norm that comes next, which can do both in one pass.
    keep: hold the results of the qkv and gate-up products for the backward pass instead of computing them again.
    """
    if not torch.is_grad_enabled():
        middle_ND, down_ND, *_ = _forward(layer, stream_ND, delta_ND, cos, sin, attend)
        return middle_ND, down_ND
    return _FusedLayer.apply(stream_ND, delta_ND, layer, cos, sin, attend, keep)  # type: ignore[return-value]


def fused_norm(norm: RMSNorm, stream_ND: Tensor, delta_ND: Tensor) -> Tensor:
    """The norm of stream + delta, as the end of a model of fused layers."""
    if not torch.is_grad_enabled():
        return _kernels(stream_ND).add_rms_norm(stream_ND, delta_ND, norm.weight, norm.eps)[1]
    return _FusedNorm.apply(stream_ND, delta_ND, norm)  # type: ignore[return-value]


def _kernels(x: Tensor) -> ModuleType:
    kernels = fused_kernels(x)
    assert kernels is not None
    return kernels


def _column(linear: ColumnParallelLinear, x_NI: Tensor) -> Tensor:
    return F.linear(x_NI, linear.weight, linear.bias)


def _row(linear: RowParallelLinear, x_NI: Tensor) -> Tensor:
    y_NO = linear.tp.all_reduce(F.linear(x_NI, linear.weight))
    return y_NO if linear.bias is None else y_NO.add_(linear.bias)


def _qkv_to_heads(layer: Layer, qkv_NX: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    attention = layer.attention
    q_size, kv_size, _ = attention.qkv.local_sizes
    return _kernels(qkv_NX).qk_norm_rope(
        qkv_NX,
        cos,
        sin,
        *_norm_weights(layer),
        q_size // attention.head_dim,
        kv_size // attention.head_dim,
        attention.head_dim,
    )


def _norm_weights(layer: Layer) -> tuple[Tensor | None, Tensor | None, float]:
    q_norm, k_norm = layer.attention.q_norm, layer.attention.k_norm
    if q_norm is None or k_norm is None:
        return None, None, 0.0
    return q_norm.weight, k_norm.weight, q_norm.eps


def _forward(
    layer: Layer, stream_ND: Tensor, delta_ND: Tensor | None, cos: Tensor, sin: Tensor, attend: Any
) -> tuple[Tensor, ...]:
    """(stream after attention, MLP's output), then what a backward pass may want: stream, qkv, attention's output and
    what its backward pass asks for, gate and up."""
    kernels = _kernels(stream_ND)
    attention, mlp = layer.attention, layer.mlp
    stream_ND, normed_ND = kernels.add_rms_norm(stream_ND, delta_ND, layer.input_norm.weight, layer.input_norm.eps)
    qkv_NX = _column(attention.qkv, normed_ND)
    heads = _qkv_to_heads(layer, qkv_NX, cos, sin)
    if isinstance(attend, PackedAttend):
        out_NHC, saved = attend.forward(*heads)
    else:
        out_NHC, saved = attend(attention.index, *heads), ()
    del heads
    added_ND = _row(attention.out, out_NHC.flatten(-2))
    middle_ND, normed_ND = kernels.add_rms_norm(stream_ND, added_ND, layer.post_norm.weight, layer.post_norm.eps)
    gate_up_N2I = _column(mlp.gate_up, normed_ND)
    down_ND = _row(mlp.down, kernels.swiglu(gate_up_N2I))
    return middle_ND, down_ND, stream_ND, qkv_NX, out_NHC, gate_up_N2I, *saved


def _norm_again(norm: RMSNorm, stream_ND: Tensor) -> Tensor:
    return _kernels(stream_ND).add_rms_norm(stream_ND, None, norm.weight, norm.eps)[1]


def _accumulate(linear: nn.Module, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Add what one product contributes to the gradients of its weight and bias."""
    weight, bias = linear.weight, linear.bias
    if weight.requires_grad:
        add_product(weight.grad, grad_NO.t(), x_NI)  # type: ignore[arg-type, operator]
    if bias is not None and bias.requires_grad:
        bias.grad.add_(grad_NO.sum(0, dtype=torch.float32))  # type: ignore[union-attr, operator]


def _norm_backward(
    norm: RMSNorm, grad_ND: Tensor, grad_sum_ND: Tensor | None, stream_ND: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of stream + delta in the dtype of the one and of the other."""
    weight_grad = norm.weight.grad if norm.weight.requires_grad else None
    return _kernels(stream_ND).rms_norm_backward(grad_ND, grad_sum_ND, stream_ND, norm.weight, norm.eps, weight_grad)


class _FusedLayer(torch.autograd.Function):
    """Weights are not inputs: their gradients go straight into their buffers."""

    @staticmethod
    def forward(
        ctx: Any,
        stream_ND: Tensor,
        delta_ND: Tensor | None,
        layer: Layer,
        cos: Tensor,
        sin: Tensor,
        attend: PackedAttend,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        middle_ND, down_ND, stream_ND, qkv_NX, out_NHC, gate_up_N2I, *saved = _forward(
            layer, stream_ND, delta_ND, cos, sin, attend
        )
        products = (qkv_NX, gate_up_N2I) if keep else (None, None)
        ctx.save_for_backward(stream_ND, middle_ND, out_NHC, cos, sin, *products, *saved)
        ctx.layer, ctx.attend, ctx.has_delta = layer, attend, delta_ND is not None
        return middle_ND, down_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stream_ND, middle_ND, out_NHC, cos, sin, qkv_NX, gate_up_N2I, *saved = ctx.saved_tensors
        layer: Layer = ctx.layer
        attention, mlp = layer.attention, layer.mlp
        kernels = _kernels(stream_ND)
        grad_middle_ND, grad_down_ND = grads[0], grads[1].contiguous()

        normed_ND = _norm_again(layer.post_norm, middle_ND)
        if gate_up_N2I is None:
            gate_up_N2I = _column(mlp.gate_up, normed_ND)
        grad_gate_up_N2I, act_NI = kernels.swiglu_backward(grad_down_ND @ mlp.down.weight, gate_up_N2I)
        _accumulate(mlp.down, grad_down_ND, act_NI)
        del act_NI, gate_up_N2I
        _accumulate(mlp.gate_up, grad_gate_up_N2I, normed_ND)
        grad_normed_ND = mlp.gate_up.tp.all_reduce(grad_gate_up_N2I @ mlp.gate_up.weight)
        del grad_gate_up_N2I
        grad_ND, grad_added_ND = _norm_backward(layer.post_norm, grad_normed_ND, grad_middle_ND, middle_ND)

        _accumulate(attention.out, grad_added_ND, out_NHC.flatten(-2))
        grad_out_NHC = (grad_added_ND @ attention.out.weight).view(out_NHC.shape)
        normed_ND = _norm_again(layer.input_norm, stream_ND)
        if qkv_NX is None:
            qkv_NX = _column(attention.qkv, normed_ND)
        heads = _qkv_to_heads(layer, qkv_NX, cos, sin)
        grad_heads = ctx.attend.backward(grad_out_NHC, *heads, out_NHC, saved)
        del heads
        q_weight, k_weight, eps = _norm_weights(layer)
        grad_qkv_NX, grad_q_weight, grad_k_weight = kernels.qk_norm_rope_backward(
            *grad_heads, qkv_NX, cos, sin, q_weight, k_weight, eps
        )
        for norm, grad_C in ((attention.q_norm, grad_q_weight), (attention.k_norm, grad_k_weight)):
            if norm is not None and grad_C is not None and norm.weight.requires_grad:
                norm.weight.grad.add_(norm.tp.all_reduce(grad_C))  # type: ignore[union-attr]
        _accumulate(attention.qkv, grad_qkv_NX, normed_ND)
        grad_normed_ND = attention.qkv.tp.all_reduce(grad_qkv_NX @ attention.qkv.weight)
        grad_ND, grad_delta_ND = _norm_backward(layer.input_norm, grad_normed_ND, grad_ND, stream_ND)
        return grad_ND, grad_delta_ND if ctx.has_delta else None, None, None, None, None, None


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream_ND: Tensor, delta_ND: Tensor, norm: RMSNorm) -> Tensor:
        sum_ND, normed_ND = _kernels(stream_ND).add_rms_norm(stream_ND, delta_ND, norm.weight, norm.eps)
        ctx.save_for_backward(sum_ND)
        ctx.norm = norm
        return normed_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (sum_ND,) = ctx.saved_tensors
        return *_norm_backward(ctx.norm, grads[0].contiguous(), None, sum_ND), None
