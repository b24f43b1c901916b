"""What checkpoints call the tensors of a mixture of experts, by family."""

from __future__ import annotations

from areno.layers.experts_config import Experts

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
