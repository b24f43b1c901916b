"""A layer as one autograd function: fused kernels between the matrix products, and a handwritten backward pass.

Compared with `Layer.forward` this saves three things. Elementwise results are not kept for the backward pass: the
kernels compute them again. Under recompute, attention and two products (the output projection and the MLP's `down`) are
not computed again, since the backward pass does not need their results. And the matrix products accumulate the weight
gradients in the fp32 gradient buffer themselves.

The residual stream is float32 for any dtype of the weights. Rounding it to bf16 after each addition would be the
largest source of error in log-probabilities, and of disagreement between rollout and training. If `memory` (the ranks'
symmetric memory) is given, each norm first sums its input over the ranks. There is then no autograd and no `split`.

This file imports Triton: import it only if `Transformer.runs_fused` returns True. Shape letters and the arguments
`angles`, `split` and `attend` as in `layer.py`; X outputs of the qkv product, P outputs of the input projection of the
gated delta rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from areno.kernels.elementwise.triton_gate import gate_heads, gate_heads_backward
from areno.kernels.elementwise.triton_heads import qk_norm_rope, qk_norm_rope_backward
from areno.kernels.symmetric_memory import SymmetricMemory
from areno.layers.attention import Attend, PackedAttend
from areno.layers.delta import GatedDelta
from areno.layers.norm import RMSNorm
from areno.layers.parallel import wait_for
from areno.models.activation_offload import ActivationOffload
from areno.models.layer import Attention, Layer

Forward = tuple[Tensor, Tensor, tuple[Tensor, ...]]
Angles = tuple[Tensor, Tensor]


def mix_tokens(layer: Layer, x_ND: Tensor, angles: Angles, attend: Attend, split: bool, whole: bool) -> Forward:
    """Compute attention or the gated delta rule of a layer, outside autograd.

    Return three results: the output (if not `whole`, only this rank's partial sum), the output of the input projection
    (the caller may drop it to save memory), and other tensors that the backward pass needs.
    """
    if layer.attention is not None:
        return _attention(layer.attention, x_ND, angles, attend, split, whole)
    assert layer.delta is not None
    proj_NP = layer.delta.in_proj(x_ND, split)
    mixed_NI = layer.delta.delta_rule(proj_NP, attend, layer.delta.weights(layer.delta.norm.weight))
    return layer.delta.out(mixed_NI, split, whole), proj_NP, (mixed_NI,)


def mix_tokens_backward(
    layer: Layer,
    grad_ND: Tensor,
    x_ND: Tensor,
    kept: Tensor | None,
    needed: Sequence[Tensor],
    angles: Angles,
    attend: PackedAttend,
    split: bool,
) -> Tensor:
    """Return the gradient with respect to the normalised input, and add the parameters' gradients to `.grad`.

    `kept` and `needed` are the second and third result of `mix_tokens`. If `kept` is None, it is computed again.
    """
    module: Attention | GatedDelta | None = layer.attention or layer.delta
    assert module is not None
    product = module.qkv if isinstance(module, Attention) else module.in_proj
    tp, work = module.out.tp, None
    if split:  # gather the input during the backward pass of attention
        grad_ND = tp.all_gather_rows(grad_ND)
        x_ND, work = tp.begin_all_gather_rows(x_ND)

    def recompute() -> Tensor:
        if kept is not None:
            return kept
        if work is not None:
            wait_for(work)
        return product(x_ND)

    if isinstance(module, Attention):
        grad_NX = _attention_backward(module, grad_ND, recompute, needed, angles, attend)
    else:
        grad_h_NR = module.out.inner_gradient(grad_ND)
        module.out.accumulate_grad(grad_ND, needed[0], grad_h_NR)
        grad_NX = module.delta_rule_backward(module.out.input_gradient(grad_ND, grad_h_NR), recompute(), attend)
    if work is not None:
        wait_for(work)
    grad_h_NR = product.inner_gradient(grad_NX)
    product.accumulate_grad(grad_NX, x_ND, grad_h_NR)
    return product.input_gradient(grad_NX, grad_h_NR, split)


def _attention(attention: Attention, x_ND: Tensor, angles: Angles, attend: Attend, split: bool, whole: bool) -> Forward:
    qkv_NX = attention.qkv(x_ND, split)
    heads = qk_norm_and_rope(attention, qkv_NX, angles)
    if isinstance(attend, PackedAttend):
        out_NHC, saved = attend.forward(attention.as_layer, *heads)
    else:  # decoding has no backward pass
        out_NHC, saved = attend(attention.as_layer, *heads), ()
    del heads
    return attention.out(_gate(attention, out_NHC, qkv_NX), split, whole), qkv_NX, (out_NHC, *saved)


def _gate(attention: Attention, out_NHC: Tensor, qkv_NX: Tensor) -> Tensor:
    """Return the output of attention, (N, Q), times the sigmoid of its gates, if there are any."""
    out_NQ = out_NHC.flatten(-2)
    return gate_heads(out_NQ, qkv_NX, attention.head_dim) if attention.gated else out_NQ


def _attention_backward(
    attention: Attention,
    grad_ND: Tensor,
    recompute: Any,
    needed: Sequence[Tensor],
    angles: Angles,
    attend: PackedAttend,
) -> Tensor:
    """Return the gradient with respect to the output of the qkv projection. `recompute()` returns that output."""
    out_NHC, *saved = needed
    out_NQ, grad_h_NR = out_NHC.flatten(-2), attention.out.inner_gradient(grad_ND)
    grad_gated_NX = None
    if attention.gated:
        qkv_NX = recompute()
        grad_gated_NX = torch.empty_like(qkv_NX, memory_format=torch.contiguous_format)
        grad_out_NQ, gated_NQ = gate_heads_backward(
            attention.out.input_gradient(grad_ND, grad_h_NR), out_NQ, qkv_NX, grad_gated_NX, attention.head_dim
        )
        attention.out.accumulate_grad(grad_ND, gated_NQ, grad_h_NR)
        del gated_NQ
    else:
        attention.out.accumulate_grad(grad_ND, out_NQ, grad_h_NR)
        grad_out_NQ = attention.out.input_gradient(grad_ND, grad_h_NR)
        qkv_NX = recompute()
    grad_out_NHC = grad_out_NQ.view(out_NHC.shape)
    heads = qk_norm_and_rope(attention, qkv_NX, angles)
    grad_q, grad_k, grad_v = attend.backward(attention.as_layer, grad_out_NHC, *heads, out_NHC, saved)
    del heads
    grad_qkv_NX, grad_q_weight, grad_k_weight = qk_norm_rope_backward(
        grad_q, grad_k, grad_v, qkv_NX, *angles, *_head_norms(attention), grad_gated_NX
    )
    for norm, grad_C in ((attention.q_norm, grad_q_weight), (attention.k_norm, grad_k_weight)):
        if isinstance(norm, RMSNorm) and grad_C is not None:
            norm.accumulate_grad(grad_C)
    return attention.norm_all_heads_backward(grad_qkv_NX, qkv_NX)


def qk_norm_and_rope(attention: Attention, qkv_NX: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, both normalised and rotated, and values, (N, heads, C) each.

    With `attention.fp8_kv`, keys and values are rounded to FP8. Their gradients pass straight through.
    """
    q_size, kv_size, _ = attention.sizes
    dim = attention.head_dim
    q_weight, k_weight, eps, plus_one = _head_norms(attention)
    sizes = q_size // dim, kv_size // dim, dim
    given = attention.norm_all_heads(qkv_NX), *angles, q_weight, k_weight, eps, *sizes
    return qk_norm_rope(*given, plus_one, attention.fp8_kv, attention.gated)


def _head_norms(attention: Attention) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """Return (query norm weight or None, key norm weight or None, eps, whether norms multiply by 1 + weight)."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm):
        return None, None, 0.0, False
    return q_norm.weight, k_norm.weight, q_norm.eps, q_norm.plus_one


def fused_layer(
    layer: Layer,
    stream_ND: Tensor,
    delta_ND: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    keep: bool,
    split: bool,
    memory: SymmetricMemory | None,
    offload: ActivationOffload | None = None,
) -> tuple[Tensor, Tensor]:
    """Add `delta_ND`, the output of the previous MLP, to the residual stream, and run a layer on the sum.

    Return the stream and the output of this layer's MLP. They are not added, because the next norm adds and normalises
    in one pass. With `memory`, MLP outputs are this rank's partial sums. Unless `keep`, the large intermediate results
    of attention and MLP are not kept, and the backward pass computes them again. `offload` saves what is kept.
    """
    stream_ND = _require_gradient(stream_ND, layer)
    return _FusedLayer.apply(layer, stream_ND, delta_ND, cos, sin, attend, keep, split, memory, offload)  # type: ignore[return-value]


def fused_norm(norm: RMSNorm, stream_ND: Tensor, delta_ND: Tensor, memory: SymmetricMemory | None) -> Tensor:
    """Return the norm of `stream_ND` + `delta_ND`: the residual stream and the output of the previous MLP."""
    if memory is not None:
        return norm.add_parts_and_norm(stream_ND, delta_ND, memory)[1]
    return _FusedNorm.apply(_require_gradient(stream_ND, norm), delta_ND, norm)  # type: ignore[return-value]


def _require_gradient(stream_ND: Tensor, module: nn.Module) -> Tensor:
    """Make the residual stream require a gradient if `module` has parameters to train, and return it.

    The autograd functions of this file do not take parameters as inputs. So autograd calls their backward pass only if
    the stream requires a gradient. If it does not yet, a new autograd leaf is returned.
    """
    if not torch.is_grad_enabled() or stream_ND.requires_grad:
        return stream_ND
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return stream_ND.detach().requires_grad_() if trained else stream_ND


def _add_norm(
    norm: RMSNorm | None,
    stream_ND: Tensor,
    delta_ND: Tensor | None,
    dtype: torch.dtype,
    memory: SymmetricMemory | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the stream and `delta_ND`, and the norm of this sum (without `norm`, the sum in `dtype`)."""
    if memory is not None and delta_ND is not None:
        assert norm is not None
        return norm.add_parts_and_norm(stream_ND, delta_ND, memory)
    if norm is not None:
        return norm.add_and_norm(stream_ND, delta_ND)
    sum_ND = stream_ND if delta_ND is None else stream_ND + delta_ND
    return sum_ND, sum_ND.to(dtype)


def _add_norm_backward(
    norm: RMSNorm | None, grad_ND: Tensor, grad_sum_ND: Tensor, sum_ND: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to the sum in `_add_norm` twice: in the sum's dtype and in that of `grad_ND`."""
    if norm is not None:
        return norm.add_and_norm_backward(grad_ND, grad_sum_ND, sum_ND)
    grad_sum_ND = grad_sum_ND + grad_ND
    return grad_sum_ND, grad_sum_ND.to(grad_ND.dtype)


def _post_norm(norm: RMSNorm | None, x_ND: Tensor) -> Tensor:
    return x_ND if norm is None else norm.add_and_norm(x_ND, None)[1]


def _post_norm_backward(norm: RMSNorm | None, grad_ND: Tensor, x_ND: Tensor | None) -> Tensor:
    return grad_ND if norm is None or x_ND is None else norm.add_and_norm_backward(grad_ND, None, x_ND)[1]


class _FusedLayer(torch.autograd.Function):
    """The autograd function of a layer. Its backward pass adds the parameters' gradients to `.grad`."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        stream_ND: Tensor,
        delta_ND: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Any,
        keep: bool,
        split: bool,
        memory: SymmetricMemory | None,
        offload: ActivationOffload | None,
    ) -> tuple[Tensor, Tensor]:
        dtype, whole = layer.dtype, memory is None
        stream_ND, normed_ND = _add_norm(layer.input_norm, stream_ND, delta_ND, dtype, memory)
        added_ND, proj_NX, mixer = mix_tokens(layer, normed_ND, (cos, sin), attend, split, whole)
        if not any(ctx.needs_input_grad):  # there is no backward pass
            keep, offload = False, None
        kept = (proj_NX,) if keep else (None,)
        del proj_NX
        middle_ND, normed_ND = _add_norm(
            layer.pre_mlp_norm, stream_ND, _post_norm(layer.post_attention_norm, added_ND), dtype, memory
        )
        down_ND, inner, needed = layer.mlp.fused_forward(normed_ND, split, whole, keep)
        added_ND = None if layer.post_attention_norm is None else added_ND
        saved = [stream_ND, middle_ND, added_ND, None if layer.post_mlp_norm is None else down_ND, *needed, *mixer]
        if offload is not None:
            if _can_recompute_middle(layer):
                saved[1:3] = None, None
            ctx.place_of_saved, saved = offload.save(saved), []
        ctx.save_for_backward(cos, sin, *kept, *inner, *saved)
        ctx.layer, ctx.attend, ctx.has_delta, ctx.split = layer, attend, delta_ND is not None, split
        ctx.n_needed, ctx.n_inner, ctx.offload = len(needed), len(inner), offload
        return middle_ND, _post_norm(layer.post_mlp_norm, down_ND)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, proj_NX, *saved = ctx.saved_tensors
        inner, saved = tuple(saved[: ctx.n_inner]), saved[ctx.n_inner :]
        if ctx.offload is not None:
            saved = ctx.offload.load(ctx.place_of_saved)
        stream_ND, middle_ND, added_ND, down_ND, *saved = saved
        needed, mixer = tuple(saved[: ctx.n_needed]), saved[ctx.n_needed :]
        layer: Layer = ctx.layer
        split, dtype = ctx.split, layer.dtype
        grad_middle_ND, grad_down_ND = grads[0], grads[1].contiguous()
        if middle_ND is None:
            added_ND = _mixed_output(layer, stream_ND, mixer)
            delta_ND = _post_norm(layer.post_attention_norm, added_ND)
            middle_ND = _add_norm(layer.pre_mlp_norm, stream_ND, delta_ND, dtype)[0]
            added_ND, delta_ND = None if layer.post_attention_norm is None else added_ND, None

        grad_down_ND = _post_norm_backward(layer.post_mlp_norm, grad_down_ND, down_ND)
        _, normed_ND = _add_norm(layer.pre_mlp_norm, middle_ND, None, dtype)
        grad_normed_ND = layer.mlp.fused_backward(grad_down_ND, normed_ND, inner, needed, split)
        grad_ND, grad_added_ND = _add_norm_backward(layer.pre_mlp_norm, grad_normed_ND, grad_middle_ND, middle_ND)
        grad_added_ND = _post_norm_backward(layer.post_attention_norm, grad_added_ND, added_ND)
        del middle_ND, added_ND, down_ND, grad_down_ND, grad_middle_ND, grad_normed_ND, normed_ND, inner

        _, normed_ND = _add_norm(layer.input_norm, stream_ND, None, dtype)
        angles, attend = (cos, sin), ctx.attend
        grad_normed_ND = mix_tokens_backward(layer, grad_added_ND, normed_ND, proj_NX, mixer, angles, attend, split)
        grad_ND, grad_delta_ND = _add_norm_backward(layer.input_norm, grad_normed_ND, grad_ND, stream_ND)
        return None, grad_ND, grad_delta_ND if ctx.has_delta else None, *(None,) * 7


def _can_recompute_middle(layer: Layer) -> bool:
    """Return whether the backward pass can compute the sum after attention again without the other ranks."""
    module = layer.attention or layer.delta
    assert module is not None
    return module.out.tp.size == 1


def _mixed_output(layer: Layer, stream_ND: Tensor, mixer: Sequence[Tensor]) -> Tensor:
    """Return the first result of `mix_tokens`, given its third one."""
    if layer.attention is None:
        assert layer.delta is not None
        return layer.delta.out(mixer[0])
    attention, qkv_NX = layer.attention, stream_ND
    if attention.gated:
        _, normed_ND = _add_norm(layer.input_norm, stream_ND, None, layer.dtype)
        qkv_NX = attention.qkv(normed_ND)
    return attention.out(_gate(attention, mixer[0], qkv_NX))


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream_ND: Tensor, delta_ND: Tensor, norm: RMSNorm) -> Tensor:
        sum_ND, normed_ND = norm.add_and_norm(stream_ND, delta_ND)
        ctx.save_for_backward(sum_ND)
        ctx.norm = norm
        return normed_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (sum_ND,) = ctx.saved_tensors
        return *ctx.norm.add_and_norm_backward(grads[0].contiguous(), None, sum_ND), None
