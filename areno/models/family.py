"""What a model family is: how it reads its `config.json`, and what its checkpoint calls each tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from areno.layers.mlp import GatedMLP
from areno.layers.shard import WeightSpec
from areno.models.config import FamilyName, RawConfig, TransformerConfig

NAMES = {
    "embed": ("model.embed_tokens",),
    "final_norm": ("model.norm",),
    "head": ("lm_head",),
    "score": ("score",),
}
LAYER_NAMES = {
    "input_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
MakeMLP = Callable[[TransformerConfig, WeightSpec], GatedMLP]
"""Makes the MLP of one layer, with uninitialised weights."""


def gated_mlp(config: TransformerConfig, spec: WeightSpec) -> GatedMLP:
    """The MLP of dense models."""
    return GatedMLP(config.hidden_size, config.intermediate_size, spec, bias=config.mlp_bias)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the registry. Without tables of its own it has Llama's names.

    names: our module -> the checkpoint's modules stacked in it, from the first row down. layer_names: the same inside a
    decoder layer, below `layers_prefix`, with the names of what `make_mlp` makes. The tables serve loading and saving.
    """

    name: FamilyName
    architecture: str  # of config.json, with a head over the vocabulary
    value_architecture: str  # the same with a head of one label
    read: Callable[[RawConfig, tuple[int, ...]], TransformerConfig]  # config.json and end-of-sequence ids
    make_mlp: MakeMLP = gated_mlp
    names: dict[str, tuple[str, ...]] = field(default_factory=lambda: NAMES)
    layers_prefix: str = "model.layers"
    layer_names: dict[str, tuple[str, ...]] = field(default_factory=lambda: LAYER_NAMES)

    def checkpoint_names(self, parameter: str) -> tuple[str, ...]:
        """ "layers.3.attention.qkv.weight" -> the checkpoint tensors it holds, in order."""
        layer, kind = parameter.rsplit(".", 1)
        if layer in self.names:
            return tuple(f"{name}.{kind}" for name in self.names[layer])
        _, index, inner = layer.split(".", 2)
        return tuple(f"{self.layers_prefix}.{index}.{name}.{kind}" for name in self.layer_names[inner])
