"""The linear layers of a model that compute in FP8, and the number of their parameters. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from areno.config.fp8 import SIZE_MULTIPLE, FP8Config
from areno.config.layout import ALONE, Layout
from areno.errors import Key, Problem
from areno.models.adapter_shapes import LinearSpec, adaptable_linears
from areno.models.config import TransformerConfig
from areno.models.families import module_names, stored_modules

_KEY = "actor.fp8_config"
_NEVER = ("model.embed_tokens", "lm_head", "score", "output", "router")  # as others name what is never in FP8


def is_in_fp8(name: str, config: TransformerConfig, fp8: FP8Config) -> bool:
    """Return whether a linear layer, such as "layers.0.attention.qkv", computes in FP8."""
    if fp8.leaves_out(int(name.split(".")[1]), config.num_layers):
        return False
    return not any(_is_part(part, stored) for part in fp8.exclude_modules for stored in _stored_names(name, config))


def n_quantized_parameters(config: TransformerConfig, fp8: FP8Config, layout: Layout = ALONE) -> int:
    """Return the number of weights in FP8 on one rank."""
    total = 0
    for _, linear in linears_in_fp8(config, fp8):
        n_in, outputs = linear.local_sizes(layout)
        total += n_in * sum(outputs)
    return total


def linears_in_fp8(config: TransformerConfig, fp8: FP8Config) -> Iterator[tuple[str, LinearSpec]]:
    linears = adaptable_linears(config)
    for name in _linear_names(config):
        if is_in_fp8(name, config, fp8):
            yield name, linears[name.split(".", 2)[2]]


def names_in_checkpoint(config: TransformerConfig, fp8: FP8Config) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers in FP8, and of those that could be in FP8 but are left out."""
    found: tuple[list[str], list[str]] = [], []
    for name in _linear_names(config):
        found[0 if is_in_fp8(name, config, fp8) else 1].extend(_names_in_files(name, config))
    return found


def emulated_linears(config: TransformerConfig, fp8: FP8Config, layout: Layout = ALONE) -> dict[str, tuple[int, int]]:
    """Return the linear layers in FP8 whose sizes FP8 units cannot multiply: name -> (outputs, inputs) on one rank."""
    found = {}
    for name, linear in linears_in_fp8(config, fp8):
        n_in, outputs = linear.local_sizes(layout)
        if n_in % SIZE_MULTIPLE or sum(outputs) % SIZE_MULTIPLE:
            found[name] = sum(outputs), n_in
    return found


def fp8_problems(config: TransformerConfig, fp8: FP8Config) -> Iterator[Problem]:
    """Yield problems of a model with FP8Config: experts, unknown modules, and no layer that is in FP8."""
    if config.experts is not None:
        yield Problem(_KEY, "is set, but experts have no products in FP8; leave it out")
        return
    if unknown := _unknown_exclusions(config, fp8):
        last = config.num_layers - 1
        inner = dict.fromkeys(
            each.split(".", 3)[3] for name in _linear_names(config) for each in module_names(name, config)
        )
        text = "has {}, which is no whole part of the name of a module; the modules are {} of layers.0 to layers.{}"
        yield Problem(f"{_KEY}.exclude_modules", text, ", ".join(unknown), ", ".join(inner), last)
    elif not any(linears_in_fp8(config, fp8)):
        if all(fp8.leaves_out(layer, config.num_layers) for layer in range(config.num_layers)):
            text = "leaves out all {} layers of the model, so none would compute in FP8; lower {} or {}, or set {}=null"
            ends = (Key(f"{_KEY}.num_layers_at_start_in_bf16"), Key(f"{_KEY}.num_layers_at_end_in_bf16"))
            yield Problem(f"{_KEY}.first_last_layers_bf16", text, config.num_layers, *ends, Key(_KEY))
        else:
            text = "leaves out all linear layers, so none would compute in FP8; name fewer, or set {}=null"
            yield Problem(f"{_KEY}.exclude_modules", text, Key(_KEY))


def _unknown_exclusions(config: TransformerConfig, fp8: FP8Config) -> list[str]:
    stored = [*_NEVER, *(each for name in _linear_names(config) for each in _stored_names(name, config))]
    return [part for part in fp8.exclude_modules if not any(_is_part(part, each) for each in stored)]


def _is_part(part: str, name: str) -> bool:
    """Return whether `part` is some whole parts of a dotted name: layers.1 is one of layers.1.mlp, not of layers.10."""
    return f".{part}." in f".{name}."


def _names_in_files(name: str, config: TransformerConfig) -> list[str]:
    _, layer, inner = name.split(".", 2)
    return [f"layers.{layer}.{each}" for each in stored_modules(inner, config)]


def _stored_names(name: str, config: TransformerConfig) -> list[str]:
    """Return the names of a linear layer's projections, and those of the matrices in which the files fuse them."""
    return [*module_names(name, config), *(f"model.{each}" for each in _names_in_files(name, config))]


def _linear_names(config: TransformerConfig) -> Iterator[str]:
    for layer in range(config.num_layers):
        mixer = "attention." if layer in config.attention_layers else "delta."
        for module in adaptable_linears(config):
            if module.startswith((mixer, "mlp.")):
                yield f"layers.{layer}.{module}"
