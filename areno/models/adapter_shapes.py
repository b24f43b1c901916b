"""The linear layers of a model that may have LoRA adapters, and the number of adapter parameters. Imports no torch.

Module names are those of the checkpoint, such as "q_proj", unless a docstring says otherwise. `layout` says how the
model is divided over devices; the results count the parameters of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from areno.config.layout import ALONE, Layout
from areno.layers.config import ROW_MULTIPLE, AdapterSpec
from areno.models.config import TransformerConfig
from areno.models.families import stored_modules, stored_names

EXPERTS = {"mlp.experts_gate_up": "experts.gate_up_proj", "mlp.experts_down": "experts.down_proj"}
"""Module in `Layer` -> name of its adapter. In transformers, each is one parameter with the matrices of all experts."""


class LinearSpec(NamedTuple):
    outputs: tuple[int, ...]  # of each projection, over all ranks
    n_in: int  # over all ranks
    n_layers: int  # number of layers of the model that have this linear layer
    row_parallel: bool = False  # ranks divide the inputs, not the outputs
    least: int = 0  # least output size on one rank; above outputs / ranks if ranks share a key head
    n_experts: int = 0  # each has a matrix of this shape, and ranks divide the experts; 0: not of experts

    def n_matrices(self, layout: Layout) -> int:
        return layout.share_rounded_down(self.n_experts) if self.n_experts else 1

    def local_sizes(self, layout: Layout) -> tuple[int, list[int]]:
        if self.n_experts:
            return self.n_in, list(self.outputs)
        if self.row_parallel:
            return layout.share_rounded_down(self.n_in), list(self.outputs)
        return self.n_in, [max(layout.share_rounded_down(size), self.least) for size in self.outputs]


def adaptable_linears(config: TransformerConfig) -> dict[str, LinearSpec]:
    """Return the linear layers that may have adapters, by module name in `Layer`, such as "attention.qkv".

    Routers and gates cannot have adapters.
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
    n_plain, experts = config.num_layers, config.experts
    if experts is not None:
        n_sparse, of_expert, shared = len(experts.layers(config.num_layers)), experts.inner_size, experts.shared_size
        n_plain -= n_sparse
        found["mlp.experts_gate_up"] = LinearSpec((2 * of_expert,), size, n_sparse, n_experts=experts.n_experts)
        found["mlp.experts_down"] = LinearSpec((size,), of_expert, n_sparse, n_experts=experts.n_experts)
        if shared:
            found["mlp.shared.gate_up"] = LinearSpec((shared, shared), size, n_sparse)
            found["mlp.shared.down"] = LinearSpec((size,), shared, n_sparse, row_parallel=True)
    if n_plain:
        found["mlp.gate_up"] = LinearSpec((inner, inner), size, n_plain)
        found["mlp.down"] = LinearSpec((size,), inner, n_plain, row_parallel=True)
    return found


def target_groups(module: str, config: TransformerConfig) -> dict[str, list[int]]:
    """Return the names by which adapters of a linear layer of `adaptable_linears` are chosen, such as "q_proj".

    The values are positions of its projections. Those of one name share one A.
    """
    if module in EXPERTS:
        return {EXPERTS[module]: [0]}
    return {name.rsplit(".", 1)[-1]: group for name, group in stored_modules(module, config).items()}


def parameters_in_peft(config: TransformerConfig, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide targets into target_modules and target_parameters of peft.

    In models with experts, peft takes the names of an MLP's projections as those of experts, so that plain MLPs are
    named by their parameters.
    """
    if config.experts is None:
        return list(targets), []
    modules, parameters = [], []
    for module in adaptable_linears(config):
        groups, stored = target_groups(module, config), list(stored_modules(module, config))
        chosen = [index for index, name in enumerate(groups) if name in targets]
        if module in EXPERTS:
            parameters += [f"mlp.{EXPERTS[module]}" for _ in chosen]
        elif module.startswith("mlp."):
            parameters += [f"{stored[index]}.weight" for index in chosen]
        else:
            modules += [list(groups)[index] for index in chosen]
    return modules, parameters


def linear_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return the sizes of the linear layers that may have adapters: name -> (outputs, inputs).

    As in peft, projections count as one layer if the checkpoint stores them as one matrix.
    """
    return {
        name: (sum(linear.outputs[index] for index in group), linear.n_in)
        for module, linear in adaptable_linears(config).items()
        for name, group in target_groups(module, config).items()
    }


def fused_names(config: TransformerConfig) -> dict[str, str]:
    """Map each projection that the checkpoint stores inside a fused matrix to the name of the fused matrix."""
    return {part.rsplit(".", 1)[-1]: whole.rsplit(".", 1)[-1] for part, whole in stored_names(config).items()}


def n_adapter_parameters(config: TransformerConfig, adapters: AdapterSpec, layout: Layout = ALONE) -> int:
    total = 0
    for linear, groups in _adapted_linears(config, adapters):
        n_in, outputs = linear.local_sizes(layout)
        n_out = sum(outputs[index] for group in groups for index in group)
        of_matrix = linear.n_layers * adapters.rank * (len(groups) * n_in + n_out)
        total += of_matrix * linear.n_matrices(layout)
    return total


def n_expert_adapter_parameters(config: TransformerConfig, adapters: AdapterSpec) -> int:
    """Return the number of parameters of the adapters of one expert, summed over the layers with experts."""
    of_experts = (linear for linear, _ in _adapted_linears(config, adapters) if linear.n_experts)
    return sum(each.n_layers * adapters.rank * (each.n_in + sum(each.outputs)) for each in of_experts)


def n_stacked_parameters(config: TransformerConfig, adapters: AdapterSpec, layout: Layout = ALONE) -> int:
    """Return how many elements `Adapter.stack` adds to the weights: below each weight, a copy of A and padding."""
    total = 0
    for linear, groups in _adapted_linears(config, adapters):
        if linear.n_experts:
            continue
        n_in, outputs = linear.local_sizes(layout)
        end = sum(outputs) + len(groups) * adapters.rank
        total += linear.n_layers * (end + -end % ROW_MULTIPLE - sum(outputs)) * n_in
    return total


def _adapted_linears(config: TransformerConfig, adapters: AdapterSpec) -> Iterator[tuple[LinearSpec, list[list[int]]]]:
    """Yield (linear layer with adapters, groups of projection indices). Projections of a group share one A."""
    for module, linear in adaptable_linears(config).items():
        named = target_groups(module, config)
        if groups := [group for name, group in named.items() if name in adapters.targets]:
            yield linear, groups
