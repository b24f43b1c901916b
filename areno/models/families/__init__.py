"""All families that are known.

What checkpoints call the tensors of a mixture of experts, by family.

What the weight files call the modules of a model. Imports no torch.
"""

from __future__ import annotations

from areno.layers.config import Experts
from areno.models.config import Family, TransformerConfig
from areno.models.families.gemma3 import GEMMA3
from areno.models.families.glm4 import GLM4
from areno.models.families.llama import LLAMA, MISTRAL, PHI3, SMOLLM3
from areno.models.families.moe import MIXTRAL, QWEN3_MOE
from areno.models.families.olmo import OLMO2, OLMO3
from areno.models.families.qwen import QWEN2, QWEN3, QWEN3_5

_KNOWN = (QWEN3, LLAMA, QWEN2, MISTRAL, PHI3, SMOLLM3, OLMO2, OLMO3, GLM4, GEMMA3, QWEN3_MOE, MIXTRAL, QWEN3_5)
FAMILIES: dict[str, Family] = {family.name: family for family in _KNOWN}


# Our module in a layer -> the module of each expert that is stacked in it, in the order of the rows.
_QWEN = {
    "mlp.router": "mlp.gate",
    "mlp.experts_gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts_down": ("mlp.experts.{}.down_proj",),
}
_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts_gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "mlp.experts_down": ("block_sparse_moe.experts.{}.w2",),
}
_NAMES: dict[str, dict[str, str | tuple[str, ...]]] = {"qwen3_moe": _QWEN, "mixtral": _MIXTRAL}


def expert_modules(family: str, experts: Experts | None, module: str) -> tuple[str, ...] | None:
    """The checkpoint's modules stacked in a module of a layer; None where it is none of a mixture of experts."""
    found = _NAMES.get(family, {}).get(module)
    if found is None or experts is None:
        return None
    if isinstance(found, str):
        return (found,)
    return tuple(name.format(expert) for expert in range(experts.n_experts) for name in found)


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
