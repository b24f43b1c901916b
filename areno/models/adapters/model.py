"""Adapters in a model: where they are, their names in a folder of peft, the base without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from areno.layers.adapters.adapter import Adapter
from areno.layers.adapters.config import AdapterSpec
from areno.layers.linear import Linear
from areno.layers.rotary import head_order
from areno.models.names import module_names, stored_modules, stored_names
from areno.models.transformer import Transformer
from areno.models.weights import Entry, Stored, order_in

PREFIX = "base_model.model."  # of every tensor in a folder of peft


def add_adapters(model: Transformer, adapters: AdapterSpec) -> None:
    """Give the model adapters with uninitialised weights. From now on only they are trained."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear):
            stored = stored_modules(name.split(".", 2)[2], model.config)
            if chosen := [group for each, group in stored.items() if each.rsplit(".", 1)[-1] in adapters.targets]:
                module.add_adapter(chosen, adapters)


def init_adapters(model: Transformer, seed: int) -> None:
    """Weights drawn from the seed, whatever the ranks and the device, with which the model still is its base."""
    generator = torch.Generator().manual_seed(seed)
    for _, adapter in _adapters(model):
        adapter.init(generator)


def make_room(model: Transformer) -> None:
    """Move the weights of layers with adapters to where sampling needs them, once they are set. See Adapter."""
    for _, module in _adapted(model):
        assert module.adapter is not None
        module.adapter.make_room(module.weight, module.bias)


def refresh_adapters(model: Transformer) -> None:
    """Before sampling begins, since the weights may have changed."""
    for _, adapter in _adapters(model):
        adapter.refresh()


def adapter_table(model: Transformer) -> list[Entry]:
    """Every tensor of the model's adapters in a fixed order, under peft's name. None where it has no adapters.

    The rows of a B that the files keep as one are a tensor for each projection here, and the A goes by the first.
    """
    found = []
    for name, adapter in _adapters(model):
        names = [f"{PREFIX}{each}" for each in module_names(name, model.config)]
        of_a = [f"{names[first]}.lora_A.weight" for first, *_ in adapter.groups]
        of_b = [f"{names[index]}.lora_B.weight" for group in adapter.groups for index in group]
        found += map(Entry, of_a, [adapter.a] * len(of_a), adapter.layout["a"])
        found += map(Entry, of_b, [adapter.b] * len(of_b), adapter.layout["b"])
    return found


def stored_adapters(model: Transformer) -> dict[str, Stored]:
    """The tensors of a folder of peft by name. Rows of a head are in the order of the file, as those of its weight."""
    config = model.config
    order, whole = head_order(config.rope, config.head_dim), stored_names(config)
    found: dict[str, Stored] = {}
    for entry in adapter_table(model):
        module, kind = entry.name.rsplit(".lora_", 1)
        inner = ".".join(module.split(".")[-2:])
        stored = found.setdefault(entry.name.replace(inner, whole.get(inner, inner)), Stored([], []))
        stored.entries.append(entry)
        stored.orders.append(order_in(inner, order, config) if kind == "B.weight" else None)
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
    for name, module in _adapted(model):
        assert module.adapter is not None
        yield name, module.adapter


def _adapted(model: Transformer) -> Iterator[tuple[str, Linear]]:
    """The layers that have one."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.adapter is not None:
            yield name, module
