"""What a fused layer does between its two norms: attention, or the gated delta rule. Written out, outside autograd.

A forward function returns what is added to the residual stream, the result of its first product, which the backward
pass takes if it is kept, and what that needs in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from areno.kernels.elementwise.triton_heads import qk_norm_rope, qk_norm_rope_backward
from areno.layers.attention import Attend, PackedAttend
from areno.layers.norm import RMSNorm
from areno.layers.parallel import wait_for
from areno.layers.recurrent.delta import GatedDelta
from areno.models.layer import Attention, Layer

Forward = tuple[Tensor, Tensor, tuple[Tensor, ...]]
Angles = tuple[Tensor, Tensor]


def mixed(layer: Layer, x_ND: Tensor, angles: Angles, attend: Attend, split: bool, whole: bool = True) -> Forward:
    """Of the layer's attention, or of what it has in that place. whole: of RowParallelLinear."""
    if layer.attention is not None:
        return _attended(layer.attention, x_ND, angles, attend, split, whole)
    assert layer.delta is not None
    given_NP = layer.delta.given(x_ND, split)
    mixed_NI = layer.delta.mixed(given_NP, attend, layer.delta.weights(layer.delta.norm.weight))
    return layer.delta.out(mixed_NI, split, whole), given_NP, (mixed_NI,)


def mixed_backward(
    layer: Layer,
    grad_ND: Tensor,
    x_ND: Tensor,
    kept: Tensor | None,
    needed: Sequence[Tensor],
    angles: Angles,
    attend: PackedAttend,
    split: bool,
) -> Tensor:
    """The gradient of x. Adds to the gradients of the parameters. kept: None is computed again."""
    module: Attention | GatedDelta | None = layer.attention or layer.delta
    assert module is not None
    first, tp, work = _first_product(module), module.out.tp, None
    if split:  # the input comes while the output's gradient goes through attention
        grad_ND = tp.joined(grad_ND)
        x_ND, work = tp.begin_join(x_ND)

    def again() -> Tensor:
        if kept is not None:
            return kept
        if work is not None:
            wait_for(work)
        return first(x_ND)

    if isinstance(module, Attention):
        grad_NX = _attended_backward(module, grad_ND, again, needed, angles, attend)
    else:
        module.out.accumulate(grad_ND, needed[0])
        grad_NX = module.mixed_backward(module.out.input_gradient(grad_ND), again(), attend)
    if work is not None:
        wait_for(work)
    first.accumulate(grad_NX, x_ND)
    return first.input_gradient(grad_NX, split)


def _first_product(module: Attention | GatedDelta) -> Any:
    return module.qkv if isinstance(module, Attention) else module.given


def _attended(attention: Attention, x_ND: Tensor, angles: Angles, attend: Attend, split: bool, whole: bool) -> Forward:
    both_NX = attention.qkv(x_ND, split)
    qkv_NX, gate_NQ = attention.ungated(both_NX)
    heads = _to_heads(attention, qkv_NX, angles, decodes=not isinstance(attend, PackedAttend))
    if isinstance(attend, PackedAttend):
        out_NHC, saved = attend.forward(*heads, attention.window)
    else:  # the decoder's, which has no backward pass
        out_NHC, saved = attend(attention.index, *heads, attention.window), ()
    del heads, qkv_NX
    out_ND = attention.out(attention.gate(out_NHC.flatten(-2), gate_NQ), split, whole)
    return out_ND, both_NX, (out_NHC, *saved)


def _attended_backward(
    attention: Attention, grad_ND: Tensor, again: Any, needed: Sequence[Tensor], angles: Angles, attend: PackedAttend
) -> Tensor:
    """The gradient of what the first product gave. again: gives that."""
    out_NHC, *saved = needed
    grad_gate_NQ = None
    if attention.gated:
        qkv_NX, gate_NQ = attention.ungated(again())
        assert gate_NQ is not None
        sigmoid_NQ, out_NQ = gate_NQ.float().sigmoid(), out_NHC.flatten(-2)
        attention.out.accumulate(grad_ND, attention.gate(out_NQ, gate_NQ))
        grad_gated_NQ = attention.out.input_gradient(grad_ND).float()
        grad_gate_NQ = (grad_gated_NQ * out_NQ * sigmoid_NQ * (1 - sigmoid_NQ)).to(gate_NQ.dtype)
        grad_out_NHC = (grad_gated_NQ * sigmoid_NQ).to(out_NHC.dtype).view(out_NHC.shape)
    else:
        attention.out.accumulate(grad_ND, out_NHC.flatten(-2))
        grad_out_NHC = attention.out.input_gradient(grad_ND).view(out_NHC.shape)
        qkv_NX = again()
    heads = _to_heads(attention, qkv_NX, angles)
    grad_q, grad_k, grad_v = attend.backward(grad_out_NHC, *heads, out_NHC, saved, attention.window)
    del heads
    grad_qkv_NX, grad_q_weight, grad_k_weight = qk_norm_rope_backward(
        grad_q, grad_k, grad_v, qkv_NX, *angles, *_head_norms(attention)
    )
    for norm, grad_C in ((attention.q_norm, grad_q_weight), (attention.k_norm, grad_k_weight)):
        if isinstance(norm, RMSNorm) and grad_C is not None:
            norm.accumulate(grad_C)
    return attention.ungated_gradient(attention.whole_gradient(grad_qkv_NX, qkv_NX), grad_gate_NQ)


def _to_heads(
    attention: Attention, qkv_NX: Tensor, angles: Angles, decodes: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q_size, kv_size, _ = attention.sizes
    dim = attention.head_dim
    q_weight, k_weight, eps, plus_one = _head_norms(attention)
    sizes = q_size // dim, kv_size // dim, dim
    return qk_norm_rope(attention.norm_whole(qkv_NX), *angles, q_weight, k_weight, eps, *sizes, plus_one, decodes)


def _head_norms(attention: Attention) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """Weights of the norms of query and key heads, their eps, and whether their factors are 1 + weight."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm):
        return None, None, 0.0, False
    return q_norm.weight, k_norm.weight, q_norm.eps, q_norm.plus_one
