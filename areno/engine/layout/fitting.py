"""Which layouts fit: models that cannot are refused, with the changes of settings that would let them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from areno.config.lora import LoraConfig
from areno.engine.layout.advice import RESTING
from areno.engine.layout.footprint import RESERVE, Footprint, gib
from areno.errors import EngineError, Key
from areno.layers.adapters.config import AdapterSpec
from areno.models.adapters.shapes import linear_shapes

Way = dict[str, Any]
"""Settings, and the values that they are to have."""


def check_fits(footprint: Footprint, device_bytes: int) -> None:
    """EngineError where it cannot fit on devices that have so much for it. It names the layouts that can."""
    if footprint.fits(device_bytes):
        return
    names = " and ".join(model.name for model in footprint.models)
    text = "{} cannot fit: each device needs {} GiB at least ({}), and has {}; "
    args: list[Any] = [names, gib(footprint.least), footprint.layout(), gib(int((1 - RESERVE) * device_bytes))]
    ways, in_adam = ways_to_fit(footprint, device_bytes), []
    if not ways:
        ways = _with_adapters(footprint, device_bytes)
        if (enough := _on_more_devices(footprint, device_bytes)) is not None:
            before = _layout(footprint)
            ways.append(({key: value for key, value in _layout(enough).items() if value != before[key]}, enough))
            in_adam = [model for model in enough.models if model.optimizer == "adam"]
    if ways:
        text += "what fits is " + " or ".join(_text(way) for way, _ in ways)
    else:
        text += "choose a smaller model ({})"
        args.append(Key("actor.path"))
    for way, found in ways:
        args += [part for key, value in way.items() for part in (Key(key), _shown(value))]
        args.append(gib(found.least))
    if in_adam:
        verb = "takes" if len(in_adam) == 1 else "take"
        text += "; " + " and ".join(["{}=adam_8bit"] * len(in_adam)) + f" {verb} less"
        args += [Key(f"{model.key}.optimizer.type") for model in in_adam]
    raise EngineError(text, *args)


def ways_to_fit(footprint: Footprint, device_bytes: int, most: int = 3) -> list[tuple[Way, Footprint]]:
    """The fewest kinds of changes that make it fit, up to `most` ways, and what they lead to."""
    fitting = [(n, way, found) for n, way, found in _others(footprint) if found.fits(device_bytes)]
    fewest = min((n for n, _, _ in fitting), default=0)
    chosen: dict[tuple[str, ...], tuple[Way, Footprint]] = {}
    for n, way, found in fitting:
        if n == fewest:
            chosen.setdefault(tuple(way), (way, found))  # of one setting the value that is nearest
    return list(chosen.values())[:most]


def _with_adapters(footprint: Footprint, device_bytes: int) -> list[tuple[Way, Footprint]]:
    """The ways that train adapters of the default rank in the place of the actor's weights.

    A reference of the actor's own folder takes no memory then: it is the actor without its adapters.
    """
    if not footprint.may_adapt:
        return []
    actor, *others = footprint.models
    targets = tuple(linear_shapes(actor.config))
    adapters = AdapterSpec(LoraConfig().lora_rank, LoraConfig().lora_alpha, targets)
    others = [model for model in others if model.optimizer or model.config.head != "lm" or model.path != actor.path]
    adapted = replace(footprint, models=(replace(actor, adapters=adapters), *others), may_adapt=False)
    way: Way = {"actor.use_lora": True}
    if adapted.fits(device_bytes):
        return [(way, adapted)]
    return [({**way, **more}, found) for more, found in ways_to_fit(adapted, device_bytes)]


def _others(footprint: Footprint) -> Iterator[tuple[int, Way, Footprint]]:
    """All that differ in settings which lower memory: (kinds of changes, settings, what they lead to).

    The least intrusive come first. What more copies could divide is left as it is where there is one copy.
    """
    now = footprint
    sizes = [size for size in range(now.tp_size, now.world_size + 1) if _divides(now, size)]
    to_codes = [model for model in now.models if model.optimizer == "adam"]
    to_host = [model for model in now.models if now.on_cuda and model.key in RESTING and not model.offload]
    stages = range(now.zero_stage, 3)
    for codes, away, size, stage in itertools.product((False, True), (False, True), sizes, stages):
        divides_nothing = stage > now.zero_stage and size == now.world_size
        if (codes and not to_codes) or (away and not to_host) or divides_nothing:
            continue
        changes: list[Way] = [
            {"engine.zero_stage": stage} if stage != now.zero_stage else {},
            {"engine.tp_size": size} if size != now.tp_size else {},
            {f"{model.key}.offload": True for model in to_host} if away else {},
            {f"{model.key}.optimizer.type": "adam_8bit" for model in to_codes} if codes else {},
        ]
        models = tuple(
            replace(
                model,
                offload=model.offload or (away and model in to_host),
                optimizer="adam_8bit" if codes and model in to_codes else model.optimizer,
            )
            for model in now.models
        )
        if n := sum(map(bool, changes)):
            way = {key: value for change in changes for key, value in change.items()}
            yield n, way, replace(now, models=models, tp_size=size, zero_stage=stage)


def _divides(footprint: Footprint, tp_size: int) -> bool:
    divided = [size for model in footprint.models for size in model.config.divided]
    sizes = [footprint.world_size, *(size for _, name, size in divided if name != "num_key_value_heads")]
    heads = [model.config.num_kv_heads for model in footprint.models]
    shared = all(n % tp_size == 0 or tp_size % n == 0 for n in heads)
    return shared and not any(size % tp_size for size in sizes)


def _on_more_devices(footprint: Footprint, device_bytes: int, most: int = 64) -> Footprint | None:
    """The first that fits on twice, four times, ... as many devices, without another change than of the layout."""
    size = footprint.world_size
    if not footprint.on_cuda:  # they would share the memory of the machine
        return None
    while (size := 2 * size) <= most:
        larger = replace(footprint, world_size=size)
        for found in [larger, *(found for _, _, found in _others(larger) if found.models == larger.models)]:
            if found.fits(device_bytes):
                return found
    return None


def _layout(footprint: Footprint) -> Way:
    return {
        "engine.world_size": footprint.world_size,
        "engine.tp_size": footprint.tp_size,
        "engine.zero_stage": footprint.zero_stage,
    }


def _text(way: Mapping[str, Any]) -> str:
    return " with ".join("{}={}" for _ in way) + " ({} GiB)"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
