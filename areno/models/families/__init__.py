"""The model families, and the names that their checkpoints give to the modules of a model. Does not import torch.

Each file in this folder declares `Family` records. A family is registered by its record alone.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from areno.models.config import Family, TransformerConfig

FAMILIES: dict[str, Family] = {
    family.name: family
    for found in pkgutil.iter_modules(__path__)
    for family in vars(import_module(f"{__name__}.{found.name}")).values()
    if isinstance(family, Family)
}
"""The families by `model_type`, in the order of their files."""


# Our module -> the checkpoint modules that are stacked in it, from the first row. LAYER_NAMES: inside a layer.
NAMES = {"embed": ("model.embed_tokens",), "final_norm": ("model.norm",), "head": ("lm_head",), "score": ("score",)}
LAYER_NAMES = {
    "input_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention": ("self_attn",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "pre_mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def module_names(module: str, config: TransformerConfig) -> tuple[str, ...]:
    """Return the names of the checkpoint modules that one module of `Transformer` holds, such as q_proj and k_proj.

    They are in the order in which their rows are stacked in the module. Modules that the weight files fuse into one are
    still listed separately.
    """
    if module in NAMES:
        return NAMES[module]
    _, index, inner = module.split(".", 2)
    return tuple(f"model.layers.{index}.{name}" for name in layer_names(inner, config))


def layer_names(module: str, config: TransformerConfig) -> tuple[str, ...]:
    """Do the same as `module_names` for a module inside a layer, such as "attention.qkv". Omits "model.layers.N"."""
    family = FAMILIES[config.family]
    if config.experts is not None and module in family.expert_names:
        names = family.expert_names[module]
        if "{}" not in names[0]:
            return names
        return tuple(name.format(expert) for expert in range(config.experts.n_experts) for name in names)
    return {**LAYER_NAMES, **family.names}[module]


def stored_names(config: TransformerConfig) -> dict[str, str]:
    """Map each module that the weight files store inside a fused module to the name of the fused module."""
    return {part: whole for whole, parts in FAMILIES[config.family].stacked.items() for part in parts}


def fused_expert_names(config: TransformerConfig) -> dict[str, str]:
    """Map each module of an expert to the tensor that holds those of all experts. Empty if the files have no such."""
    family = FAMILIES[config.family]
    if not family.transposed_experts and (config.stored is None or not config.stored.fused_experts):
        return {}
    return {part: whole for whole, module in family.fused_experts.items() for part in layer_names(module, config)}


def unread_prefixes(config: TransformerConfig) -> tuple[str, ...]:
    """Return the prefixes of the names of tensors in the weight files that areno does not use."""
    after = range(config.num_layers, config.num_layers + config.unread_layers)
    return (*FAMILIES[config.family].unread, *(f"model.layers.{index}." for index in after))


def stored_modules(module: str, config: TransformerConfig) -> dict[str, list[int]]:
    """Return the modules in the weight files that make up a module of a layer, such as "attention.qkv".

    The values are positions in `layer_names`. A module has several if the files fuse several projections.
    """
    whole, found = stored_names(config), {}
    for index, name in enumerate(layer_names(module, config)):
        found.setdefault(whole.get(name, name), []).append(index)
    return found
