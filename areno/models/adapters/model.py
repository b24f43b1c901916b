"""Adapters in a model: where they are, their names in a folder of peft, the base without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from areno.layers.adapter import Adapter
from areno.layers.adapter_config import AdapterSpec
from areno.layers.linear import Linear
from areno.layers.rotary import head_order
from areno.models.transformer import Transformer
from areno.models.weights import Entry, Stored, module_names, order_in

PREFIX = "base_model.model."  # of every tensor in a folder of peft


def add_adapters(model: Transformer, adapters: AdapterSpec) -> None:
    """Give the model adapters with uninitialised weights. From now on only they are trained."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear):
            names = [each.rsplit(".", 1)[-1] for each in module_names(name, model)]
            if chosen := [index for index, each in enumerate(names) if each in adapters.targets]:
                module.add_adapter(chosen, adapters)


def init_adapters(model: Transformer, seed: int) -> None:
    """Weights drawn from the seed, whatever the ranks and the device, with which the model still is its base."""
    generator = torch.Generator().manual_seed(seed)
    for _, adapter in _adapters(model):
        adapter.init(generator)


def adapter_table(model: Transformer) -> list[Entry]:
    """Every tensor of the model's adapters under peft's name, in a fixed order. None where it has no adapters."""
    return [
        Entry(f"{PREFIX}{module_names(name, model)[index]}.lora_{kind.upper()}.weight", parameter, part)
        for name, adapter in _adapters(model)
        for kind, parameter in (("a", adapter.a), ("b", adapter.b))
        for index, part in zip(adapter.projections, adapter.layout[kind], strict=True)
    ]


def stored_adapters(model: Transformer) -> dict[str, Stored]:
    """The tensors of a folder of peft by name. Rows of a head are in the order of the file, as those of its weight."""
    order = head_order(model.config.rope, model.config.head_dim)
    found: dict[str, Stored] = {}
    for entry in adapter_table(model):
        inner = ".".join(entry.name.removesuffix(".lora_B.weight").split(".")[-2:])  # of the first ones, none we know
        found[entry.name] = Stored([entry], [order_in(inner, order, model.config)])
    return found


@contextmanager
def without_adapters(model: Transformer) -> Iterator[None]:
    """Within it the model computes as its base does. Not for captured CUDA graphs, which keep what they are."""
    adapters = [adapter for _, adapter in _adapters(model)]
    try:
        for adapter in adapters:
            adapter.on = False
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def _adapters(model: Transformer) -> Iterator[tuple[str, Adapter]]:
    """The name of a layer, and its adapter."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.adapter is not None:
            yield name, module.adapter
