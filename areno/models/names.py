"""What the weight files call the modules of a model. Imports no torch."""

from __future__ import annotations

from areno.models.config import TransformerConfig
from areno.models.experts.names import expert_modules
from areno.models.families.table import FAMILIES

# Our module -> the checkpoint's modules stacked in it, from the first row down; then the same inside a layer.
NAMES = {"embed": ("model.embed_tokens",), "final_norm": ("model.norm",), "head": ("lm_head",), "score": ("score",)}
LAYER_NAMES = {
    "input_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def module_names(module: str, config: TransformerConfig) -> tuple[str, ...]:
    """ "layers.3.attention.qkv" -> the checkpoint's modules stacked in it, from the first row down."""
    if module in NAMES:
        return NAMES[module]
    _, index, inner = module.split(".", 2)
    return tuple(f"model.layers.{index}.{name}" for name in layer_names(inner, config))


def layer_names(module: str, config: TransformerConfig) -> tuple[str, ...]:
    """The same inside a layer. Names are Llama's or the family's own, also where its files keep several as one."""
    own = {**LAYER_NAMES, **FAMILIES[config.family].names}
    return expert_modules(config.family, config.experts, module) or own[module]


def stored_names(config: TransformerConfig) -> dict[str, str]:
    """Modules inside a layer that the files keep as one with others -> the files' name of that one."""
    return {part: whole for whole, parts in FAMILIES[config.family].stacked.items() for part in parts}


def stored_modules(module: str, config: TransformerConfig) -> dict[str, list[int]]:
    """ "attention.qkv" -> the files' modules that are stacked in it, each with the numbers of its projections.

    A file's module has one projection, or several where the files keep these as one.
    """
    whole, found = stored_names(config), {}
    for index, name in enumerate(layer_names(module, config)):
        found.setdefault(whole.get(name, name), []).append(index)
    return found
