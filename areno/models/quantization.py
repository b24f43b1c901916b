"""Linear layers in 8 bits: which layers of a model have a quantized weight, and when it is made from the weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from areno.config.fp8 import FP8Config
from areno.kernels.fp8.int8 import Int8Matrix
from areno.kernels.fp8.matmul import QuantizedMatrix
from areno.layers.linear import Linear
from areno.layers.mlp import Router
from areno.models.fp8_layers import is_in_fp8
from areno.models.transformer import Transformer


def quantize_linears(model: Transformer, fp8: FP8Config, *, free_weights: bool = False) -> None:
    """Let the linear layers of a model compute in FP8, or with weights in int8, except those that `fp8` leaves out.

    If `free_weights`, the weights are frozen, and leave the memory one after another. Otherwise `quantize_again` must
    be called after each change of the weights.
    """
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or isinstance(module, Router):
            continue
        if is_in_fp8(name, model.config, fp8):
            kind = QuantizedMatrix if fp8.rounds_inputs else Int8Matrix
            module.quantized = kind.of(module.weight, dgrad=fp8.dgrad, wgrad=fp8.wgrad)
            if free_weights:
                module.free_weight()


def quantize_again(model: Transformer) -> None:
    """Round the weights of the layers in FP8 again, after the weights have changed."""
    for module in quantized_linears(model):
        if module.has_weight:
            assert module.quantized is not None
            module.quantized.set(module.weight)


def quantized_linears(model: Transformer) -> Iterator[Linear]:
    for module in model.modules():
        if isinstance(module, Linear) and module.quantized is not None:
            yield module


def quantized_buffers(model: Transformer) -> list[Tensor]:
    found = [module.quantized for module in quantized_linears(model)]
    return [buffer.view(-1) for each in found if each is not None for buffer in each.buffers]
