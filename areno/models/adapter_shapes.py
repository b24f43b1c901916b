"""Which layers of a model may have adapters, and what these take. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from areno.config.run import ALONE, Layout
from areno.layers.config import ROW_MULTIPLE, AdapterSpec
from areno.models.config import TransformerConfig
from areno.models.families import stored_modules, stored_names

OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""The names in checkpoints of a router and of the layers of experts, which have no adapters."""


class _Linear(NamedTuple):
    """A linear layer of ours. outputs: of each of its projections.

    row_parallel: over tensor-parallel ranks; others divide outputs. least: outputs of a projection on each rank.
    """

    outputs: tuple[int, ...]
    n_in: int
    n_layers: int
    row_parallel: bool = False
    least: int = 0

    def on_rank(self, layout: Layout) -> tuple[int, list[int]]:
        """Return the inputs of one rank, and its outputs of each projection."""
<<<<<<< HEAD
        if self.row_parallel:
            return layout.share(self.n_in), list(self.outputs)
        return self.n_in, [max(layout.share(size), self.least) for size in self.outputs]
=======
        if self.row_parallel:
            return self.n_in // tp_size, list(self.outputs)
        return self.n_in, [max(size // tp_size, self.least) for size in self.outputs]
>>>>>>> 2ef0816 (Layers: docstrings with shapes and dtypes, collectives by their usual names, checked by pydocstyle)


def _linears(config: TransformerConfig) -> dict[str, _Linear]:
    """By our names in a layer. Those of experts are left out; a model that has some has none in other MLPs either."""
    size, inner, n_attend = config.hidden_size, config.intermediate_size, len(config.attention_layers)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = (q_size * (1 + config.attention_gate), kv_size, kv_size)
    found = {
        "attention.qkv": _Linear(qkv, size, n_attend, least=config.head_dim),  # a rank has one head at least
        "attention.out": _Linear((size,), q_size, n_attend, row_parallel=True),
    }
    if config.delta is not None:
        n_recur = len(config.delta.layers)
        found["delta.in_proj"] = _Linear(config.delta.projections, size, n_recur)
        found["delta.out"] = _Linear((size,), config.delta.inner_size, n_recur, row_parallel=True)
    if config.experts is None:
        found["mlp.gate_up"] = _Linear((inner, inner), size, config.num_layers)
        found["mlp.down"] = _Linear((size,), inner, config.num_layers, row_parallel=True)
    return found


def linear_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """The linear layers of a model's layers that may have adapters: (outputs, inputs) by the files' names.

    All that the files have, but for experts. What they keep as one has one adapter, as peft would give it.
    """
    return {
        name.rsplit(".", 1)[-1]: (sum(linear.outputs[index] for index in group), linear.n_in)
        for module, linear in _linears(config).items()
        for name, group in stored_modules(module, config).items()
    }


def kept_within(config: TransformerConfig) -> dict[str, str]:
    """The names of linear layers that the files keep as one with others -> their name of that one."""
    return {part.rsplit(".", 1)[-1]: whole.rsplit(".", 1)[-1] for part, whole in stored_names(config).items()}


def adapter_parameters(config: TransformerConfig, adapters: AdapterSpec, layout: Layout = ALONE) -> int:
    """Elements of all adapters on one rank."""
    total = 0
    for linear, groups in _adapted(config, adapters):
        n_in, outputs = linear.on_rank(layout)
        n_out = sum(outputs[index] for group in groups for index in group)
        total += linear.n_layers * adapters.rank * (len(groups) * n_in + n_out)
    return total


def copied_parameters(config: TransformerConfig, adapters: AdapterSpec, layout: Layout = ALONE) -> int:
    """Elements of the copies of A below the layers' weights on one rank, with the rows that fill up a multiple."""
    total = 0
    for linear, groups in _adapted(config, adapters):
        n_in, outputs = linear.on_rank(layout)
        end = sum(outputs) + len(groups) * adapters.rank
        total += linear.n_layers * (end + -end % ROW_MULTIPLE - sum(outputs)) * n_in
    return total


def _adapted(config: TransformerConfig, adapters: AdapterSpec) -> Iterator[tuple[_Linear, list[list[int]]]]:
    """Yield each linear layer that has adapters, with the groups of its projections that share an A."""
    for module, linear in _linears(config).items():
        stored = stored_modules(module, config)
        if groups := [group for name, group in stored.items() if name.rsplit(".", 1)[-1] in adapters.targets]:
            yield linear, groups
