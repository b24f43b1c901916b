"""The layers of a decoding step with at most 64 rows, as one chain of kernels with programmatic dependent launch (PDL).

With few rows, each kernel takes a few microseconds, and a quarter of a layer's time is lost between kernels. With PDL,
a kernel begins before the previous one has ended (`kernels/jit.py`). The results are those of `models/fused.py`, except
for rounding.

This file imports Triton: import it only if `Transformer.runs_fused` returns True. Shape letters as in `transformer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areno.kernels.matmul.triton_few_rows import (
    MOST_ROWS,
    few_rows_matmul,
    gated_product,
    partial_products,
    supports_few_rows,
)
from areno.layers.attention import Attend, CachedAttend, PackedAttend
from areno.layers.mlp import GatedMLP
from areno.layers.norm import RMSNorm, ShardedRMSNorm
from areno.models.fused import Angles, qk_norm_and_rope
from areno.models.layer import Layer


def can_run_few_rows(layers: Sequence[Layer], n_tokens: int, attend: Attend) -> bool:
    """Return whether `few_rows_layers` can compute a forward pass.

    The pass must be part of a rollout, without gradients, and have at most `MOST_ROWS` tokens. The model must be on one
    GPU, and `supports_few_rows` must accept its weights. Each layer must have attention and a gated MLP, and its only
    norms must be those before attention and MLP. Adapters must be inactive, and `engine.exact` and FP8 must be off.
    """
    if torch.is_grad_enabled() or n_tokens > MOST_ROWS or isinstance(attend, PackedAttend | CachedAttend):
        return False
    return all(_is_supported_layer(layer) for layer in layers)


def _is_supported_layer(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if attention is None or attention.gated or isinstance(attention.q_norm, ShardedRMSNorm):
        return False
    if layer.input_norm is None or layer.post_attention_norm is not None or not isinstance(mlp, GatedMLP):
        return False
    linears = attention.qkv, attention.out, mlp.gate_up, mlp.down
    return all(
        linear.tp.size == 1
        and linear.fixed_order is None
        and linear.quantized is None
        and (linear.bias is None or linear is attention.qkv)
        and (linear.adapter is None or not linear.adapter.on)
        and supports_few_rows(linear.weight)
        for linear in linears
    )


def few_rows_layers(
    layers: Sequence[Layer], final_norm: RMSNorm, x_ND: Tensor, angles: Sequence[Angles], attend: Attend
) -> Tensor:
    """Return the hidden states after all layers and the final norm, in the dtype of the weights.

    The kernel before this chain does not use PDL, so all weights are complete when the chain begins
    (`kernels/jit.py`).
    """
    stream_ND, delta_SND = x_ND.float(), None
    for layer, of_layer in zip(layers, angles, strict=True):
        stream_ND, delta_SND = _run_layer(layer, stream_ND, delta_SND, of_layer, attend)
    return final_norm.add_and_norm(stream_ND, delta_SND)[1]


def _run_layer(
    layer: Layer, stream_ND: Tensor, delta_SND: Tensor | None, angles: Angles, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Run a layer on the sum of the residual stream and the S tensors of `delta_SND`, the previous MLP's output.

    Return the stream without the output of this layer's MLP, and that output in the form of `delta_SND`.
    """
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    assert isinstance(mlp, GatedMLP)
    assert isinstance(layer.input_norm, RMSNorm)
    assert isinstance(layer.pre_mlp_norm, RMSNorm)
    stream_ND, normed_ND = layer.input_norm.add_and_norm(stream_ND, delta_SND)
    qkv_NX = few_rows_matmul(normed_ND, attention.qkv.weight, attention.qkv.bias)
    heads = qk_norm_and_rope(attention, qkv_NX, angles)
    out_NHC = attend(attention.as_layer, *heads)
    out_SND = partial_products(out_NHC.flatten(-2), attention.out.weight)
    stream_ND, normed_ND = layer.pre_mlp_norm.add_and_norm(stream_ND, out_SND)
    return stream_ND, partial_products(gated_product(normed_ND, mlp.gate_up.weight, mlp.gelu), mlp.down.weight)
