"""What a model family is: how it reads its `config.json`, and what its checkpoint calls each tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areno.models.config import FamilyName, RawConfig, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the registry.

    names: our layer -> the checkpoint layers stacked in it, from the first row down. layer_names: the same inside a
    decoder layer, below `layers_prefix`. This one table serves loading and saving.
    """

    name: FamilyName
    architecture: str  # of config.json, with a head over the vocabulary
    value_architecture: str  # the same with a head of one label
    read: Callable[[RawConfig, tuple[int, ...]], TransformerConfig]  # config.json and end-of-sequence ids
    names: dict[str, tuple[str, ...]]
    layers_prefix: str
    layer_names: dict[str, tuple[str, ...]]

    def checkpoint_names(self, parameter: str) -> tuple[str, ...]:
        """ "layers.3.attention.qkv.weight" -> the checkpoint tensors it holds, in order."""
        layer, kind = parameter.rsplit(".", 1)
        if layer in self.names:
            return tuple(f"{name}.{kind}" for name in self.names[layer])
        _, index, inner = layer.split(".", 2)
        return tuple(f"{self.layers_prefix}.{index}.{name}.{kind}" for name in self.layer_names[inner])
