"""The linear layers of a model that may have LoRA adapters, and the number of adapter parameters. Imports no torch.

Module names are those of the checkpoint, such as "q_proj", unless a docstring says otherwise. `layout` says how the
model is divided over devices; the results count the parameters of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from areno.config.layout import ALONE, Layout
from areno.layers.config import ROW_MULTIPLE, AdapterSpec
from areno.models.config import TransformerConfig
from areno.models.families import stored_modules, stored_names

OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Checkpoint names of routers and of layers of experts, which have no adapters."""


class LinearSpec(NamedTuple):
    outputs: tuple[int, ...]  # of each projection, over all ranks
    n_in: int  # over all ranks
    n_layers: int  # number of layers of the model that have this linear layer
    row_parallel: bool = False  # ranks divide the inputs, not the outputs
    least: int = 0  # least output size on one rank; above outputs / ranks if ranks share a key head

    def local_sizes(self, layout: Layout) -> tuple[int, list[int]]:
        if self.row_parallel:
            return layout.share_rounded_down(self.n_in), list(self.outputs)
        return self.n_in, [max(layout.share_rounded_down(size), self.least) for size in self.outputs]


def adaptable_linears(config: TransformerConfig) -> dict[str, LinearSpec]:
    """Return the linear layers that may have adapters, by module name in `Layer`, such as "attention.qkv".

    Experts that a router chooses cannot have adapters. In a model with experts, plain MLPs cannot have adapters either.
    """
    size, inner, n_attend = config.hidden_size, config.intermediate_size, len(config.attention_layers)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = (q_size * (1 + config.attention_gate), kv_size, kv_size)
    found = {
        "attention.qkv": LinearSpec(qkv, size, n_attend, least=config.head_dim),  # a rank has at least one head
        "attention.out": LinearSpec((size,), q_size, n_attend, row_parallel=True),
    }
    if config.delta is not None:
        n_recur = len(config.delta.layers)
        found["delta.in_proj"] = LinearSpec(config.delta.projection_sizes, size, n_recur)
        found["delta.out"] = LinearSpec((size,), config.delta.inner_size, n_recur, row_parallel=True)
    if config.experts is None:
        found["mlp.gate_up"] = LinearSpec((inner, inner), size, config.num_layers)
        found["mlp.down"] = LinearSpec((size,), inner, config.num_layers, row_parallel=True)
    elif config.experts.shared_size:
        shared, n_sparse = config.experts.shared_size, len(config.experts.layers(config.num_layers))
        found["mlp.shared.gate_up"] = LinearSpec((shared, shared), size, n_sparse)
        found["mlp.shared.down"] = LinearSpec((size,), shared, n_sparse, row_parallel=True)
    return found


def linear_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return the sizes of the linear layers that may have adapters: name -> (outputs, inputs).

    As in peft, projections count as one layer if the checkpoint stores them as one matrix.
    """
    return {
        name.rsplit(".", 1)[-1]: (sum(linear.outputs[index] for index in group), linear.n_in)
        for module, linear in adaptable_linears(config).items()
        for name, group in stored_modules(module, config).items()
    }


def fused_names(config: TransformerConfig) -> dict[str, str]:
    """Map each projection that the checkpoint stores inside a fused matrix to the name of the fused matrix."""
    return {part.rsplit(".", 1)[-1]: whole.rsplit(".", 1)[-1] for part, whole in stored_names(config).items()}


def n_adapter_parameters(config: TransformerConfig, adapters: AdapterSpec, layout: Layout = ALONE) -> int:
    total = 0
    for linear, groups in _adapted_linears(config, adapters):
        n_in, outputs = linear.local_sizes(layout)
        n_out = sum(outputs[index] for group in groups for index in group)
        total += linear.n_layers * adapters.rank * (len(groups) * n_in + n_out)
    return total


def n_stacked_parameters(config: TransformerConfig, adapters: AdapterSpec, layout: Layout = ALONE) -> int:
    """Return how many elements `Adapter.stack` adds to the weights: below each weight, a copy of A and padding."""
    total = 0
    for linear, groups in _adapted_linears(config, adapters):
        n_in, outputs = linear.local_sizes(layout)
        end = sum(outputs) + len(groups) * adapters.rank
        total += linear.n_layers * (end + -end % ROW_MULTIPLE - sum(outputs)) * n_in
    return total


def _adapted_linears(config: TransformerConfig, adapters: AdapterSpec) -> Iterator[tuple[LinearSpec, list[list[int]]]]:
    """Yield (linear layer with adapters, groups of projection indices). Projections of a group share one A."""
    for module, linear in adaptable_linears(config).items():
        stored = stored_modules(module, config)
        if groups := [group for name, group in stored.items() if name.rsplit(".", 1)[-1] in adapters.targets]:
            yield linear, groups
