"""Which layouts fit: models that cannot are refused, with the changes of settings that would let them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from areno.engine.layout.footprint import RESERVE, Footprint, gib
from areno.errors import EngineError, Key

Way = dict[str, Any]
"""Settings, and the values that they are to have."""


def check_fits(footprint: Footprint, device_bytes: int) -> None:
    """EngineError where it cannot fit on devices that have so much for it. It names the layouts that can."""
    if footprint.fits(device_bytes):
        return
    names = " and ".join(model.name for model in footprint.models)
    text = "{} cannot fit: each device needs {} GiB at least ({}), and has {}; "
    args: list[Any] = [names, gib(footprint.least), footprint.layout(), gib(int((1 - RESERVE) * device_bytes))]
    if ways := ways_to_fit(footprint, device_bytes):
        text += "what fits is " + " or ".join(_text(way) for way, _ in ways)
        for way, found in ways:
            args += [part for key, value in way.items() for part in (Key(key), _shown(value))]
            args.append(gib(found.least))
    elif (enough := _on_more_devices(footprint, device_bytes)) is not None:
        text += "what fits is {}={} with {}={} and {}={}, and adam_8bit takes less"
        numbers = {"world_size": enough.world_size, "tp_size": enough.tp_size, "zero_stage": enough.zero_stage}
        args += [part for name, value in numbers.items() for part in (Key(f"engine.{name}"), value)]
    else:
        text += "choose a smaller model ({})"
        args.append(Key("actor.path"))
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


def _others(footprint: Footprint) -> Iterator[tuple[int, Way, Footprint]]:
    """All that differ in settings which lower memory: (kinds of changes, settings, what they lead to).

    The least intrusive come first. What more copies could divide is left as it is where there is one copy.
    """
    now = footprint
    sizes = [size for size in range(now.tp_size, now.world_size + 1) if _divides(now, size)]
    to_codes = [model for model in now.models if model.optimizer == "adam"]
    to_host = [model for model in now.models if model.key in ("ref", "reward", "critic") and not model.offload]
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
    while (size := 2 * size) <= most:
        larger = replace(footprint, world_size=size)
        for found in [larger, *(found for _, _, found in _others(larger) if found.models == larger.models)]:
            if found.fits(device_bytes):
                return found
    return None


def _text(way: Mapping[str, Any]) -> str:
    return " with ".join("{}={}" for _ in way) + " ({} GiB)"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
