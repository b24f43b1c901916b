"""The linear layers of a model that compute in FP8, and the number of their parameters. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from areno.config.fp8 import FP8Config
from areno.config.layout import ALONE, Layout
from areno.models.adapter_shapes import adaptable_linears
from areno.models.config import TransformerConfig
from areno.models.families import module_names

_NEVER = ("model.embed_tokens", "lm_head", "score", "output", "router")  # as others name what is never in FP8


def is_in_fp8(name: str, config: TransformerConfig, fp8: FP8Config) -> bool:
    """Return whether a linear layer, such as "layers.0.attention.qkv", computes in FP8."""
    if fp8.leaves_out(int(name.split(".")[1]), config.num_layers):
        return False
    return not any(part in stored for part in fp8.exclude_modules for stored in module_names(name, config))


def n_quantized_parameters(config: TransformerConfig, fp8: FP8Config, layout: Layout = ALONE) -> int:
    """Return the number of weights in FP8 on one rank."""
    total, linears = 0, adaptable_linears(config)
    for name in _linear_names(config):
        if is_in_fp8(name, config, fp8):
            n_in, outputs = linears[name.split(".", 2)[2]].local_sizes(layout)
            total += n_in * sum(outputs)
    return total


def unknown_exclusions(config: TransformerConfig, fp8: FP8Config) -> list[str]:
    """Return the texts in exclude_modules that are in no name of a module."""
    stored = [*_NEVER, *(each for name in _linear_names(config) for each in module_names(name, config))]
    return [part for part in fp8.exclude_modules if not any(part in each for each in stored)]


def _linear_names(config: TransformerConfig) -> Iterator[str]:
    for layer in range(config.num_layers):
        mixer = "attention." if layer in config.attention_layers else "delta."
        for module in adaptable_linears(config):
            if module.startswith((mixer, "mlp.")):
                yield f"layers.{layer}.{module}"
