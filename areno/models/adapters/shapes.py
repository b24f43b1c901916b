"""Which layers of a model may have adapters, and what these take. Imports no torch."""

from __future__ import annotations

from areno.layers.adapter_config import AdapterSpec
from areno.models.config import TransformerConfig


def linear_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """The linear layers of each of its layers that may have adapters: (outputs, inputs) by their checkpoint names.

    Experts may have none, nor may layers with a recurrent state; the latter's MLPs may. A model with experts in some
    layers has none in the MLPs of the others either. Layers that a family's checkpoint keeps as one have none, as peft
    would give that one a single adapter.
    """
    size, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (q_size * (1 + config.attention_gate), size),
        "k_proj": (kv_size, size),
        "v_proj": (kv_size, size),
        "o_proj": (size, q_size),
    }
    mlp = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}
    found = attention if config.experts is not None else {**attention, **mlp}
    return {name: shape for name, shape in found.items() if name not in _STACKED.get(config.family, ())}


OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""The names in checkpoints of a router and of the layers of experts, which have no adapters."""


_STACKED = {  # see Family.stacked
    "phi3": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "glm4": ("gate_proj", "up_proj"),
}
_DIVIDES_INPUTS = ("o_proj", "down_proj")  # over tensor-parallel ranks; the others divide outputs
_OF_MLP = ("gate_proj", "up_proj", "down_proj")
_OF_HEADS = ("k_proj", "v_proj")  # whose outputs are key-value heads; a rank has one at least


def adapter_parameters(config: TransformerConfig, adapters: AdapterSpec, tp_size: int = 1) -> int:
    """Elements of all adapters on one rank."""
    total = 0
    for name, (n_out, n_in) in linear_shapes(config).items():
        if name in adapters.targets:
            split, whole = (n_in, n_out) if name in _DIVIDES_INPUTS else (n_out, n_in)
            of_rank = max(split // tp_size, config.head_dim) if name in _OF_HEADS else split // tp_size
            n_layers = config.num_layers if name in _OF_MLP else len(config.attention_layers)
            total += n_layers * adapters.rank * (of_rank + whole)
    return total
