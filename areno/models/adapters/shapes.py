"""Which layers of a model may have adapters, and what these take. Imports no torch."""

from __future__ import annotations

from areno.layers.adapter_config import AdapterSpec
from areno.models.config import TransformerConfig


def linear_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """The linear layers of each of its layers that may have adapters: (outputs, inputs) by their checkpoint names."""
    size, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": (q_size, size),
        "k_proj": (kv_size, size),
        "v_proj": (kv_size, size),
        "o_proj": (size, q_size),
        "gate_proj": (inner, size),
        "up_proj": (inner, size),
        "down_proj": (size, inner),
    }


_DIVIDES_INPUTS = ("o_proj", "down_proj")  # over tensor-parallel ranks; the others divide outputs


def adapter_parameters(config: TransformerConfig, adapters: AdapterSpec, tp_size: int = 1) -> int:
    """Elements of all adapters on one rank."""
    of_layer = 0
    for name, (n_out, n_in) in linear_shapes(config).items():
        if name in adapters.targets:
            split, whole = (n_in, n_out) if name in _DIVIDES_INPUTS else (n_out, n_in)
            of_layer += adapters.rank * (split // tp_size + whole)
    return config.num_layers * of_layer
