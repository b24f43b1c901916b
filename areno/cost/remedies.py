"""Changes of settings that lower the need for memory: for models that do not fit, and after memory has run out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areno.config.lora import LoraConfig
from areno.config.models import MicroBatchSpec
from areno.config.rollout import DecoderConfig
from areno.cost.footprint import RESERVE, RESTING, Footprint, ModelFootprint, gib_text, may_suggest_lora
from areno.cost.kv_cache import may_verify_drafts
from areno.errors import EngineError, Key
from areno.layers.config import AdapterSpec
from areno.models.adapter_shapes import linear_shapes
from areno.specs.engine import EngineSpec
from areno.specs.role import LoraSpec, RoleSpec

_MOST_WAYS, _MOST_DEVICES = 4, 64

Way = dict[str, Any]
"""Changed settings: name -> new value."""


def check_device_memory(footprint: Footprint, device_bytes: int) -> None:
    if replace(footprint, host_bytes=None).fits(device_bytes):
        return
    names = " and ".join(model.name for model in footprint.models)
    text = "{} cannot fit: each device needs {} GiB at least ({}), and has {}; "
    args: list[Any] = [
        names,
        gib_text(footprint.min_device_bytes),
        footprint.layout_in_words(),
        gib_text(int((1 - RESERVE) * device_bytes)),
    ]
    ways, shrinkable = fitting_remedies(footprint, device_bytes), []
    if not ways:
        ways = _remedy_with_lora(footprint, device_bytes)
        if (enough := _footprint_on_more_devices(footprint, device_bytes)) is not None:
            before = _layout_change(footprint)
            ways.append(({key: value for key, value in _layout_change(enough).items() if value != before[key]}, enough))
            shrinkable = [model for model in enough.models if model.smaller_optimizer]
    if ways:
        text += "what fits is " + " or ".join(_remedy_text(way) for way, _ in ways)
    else:
        text += "choose a smaller model ({})"
        args.append(Key("actor.path"))
    for way, found in ways:
        args += [part for key, value in way.items() for part in (Key(key), _value_text(value))]
        args.append(gib_text(found.min_device_bytes))
    if shrinkable:
        verb = "takes" if len(shrinkable) == 1 else "take"
        text += "; " + " and ".join(f"{{}}={model.smaller_optimizer}" for model in shrinkable) + f" {verb} less"
        args += [Key(f"{model.own_section}.optimizer.type") for model in shrinkable]
    raise EngineError(text, *args)


def check_host_memory(footprint: Footprint, n_ranks: int) -> None:
    """Raise an EngineError if the offloaded models of `n_ranks` ranks do not fit into the host memory."""
    if footprint.fits_host:
        return
    assert footprint.host_bytes is not None
    away = [model for model in footprint.models if model.offload]
    shrinkable = [model for model in away if model.smaller_optimizer]
    divides = any(model.optimizer for model in away) and footprint.layout.dp_size > 1 and footprint.zero_stage == 0
    ways = [f"set {{}}={model.smaller_optimizer}" for model in shrinkable]
    ways += ["set {}=1"] * divides + ["turn off {}"] * len(away)
    keys = [f"{model.own_section}.optimizer.type" for model in shrinkable] + ["engine.zero_stage"] * divides
    raise EngineError(
        "the host memory is too small for {}: what offload keeps there takes {} GiB for the ranks of a machine ({}), "
        f"and {{}} GiB are free; {join_by_or(['use a machine with more memory', *ways])}",
        " and ".join(model.name for model in away),
        gib_text(n_ranks * footprint.offloaded_bytes),
        n_ranks,
        gib_text(n_ranks * int((1 - RESERVE) * footprint.host_bytes)),
        *map(Key, keys),
        *(Key(f"{model.own_section}.offload") for model in away),
    )


def fitting_remedies(footprint: Footprint, device_bytes: int) -> list[tuple[Way, Footprint]]:
    """Return alternative changes of settings with which the models fit, each with the footprint that results.

    The kinds of changes are zero_stage, tp_size, offloading of models that are not always used, offloading of the
    actor's masters and moments, and 8-bit optimizers. Only the alternatives with the fewest kinds are returned.
    """
    fitting = [(n, way, found) for n, way, found in _remedies_beside_lora(footprint) if found.fits(device_bytes)]
    fewest = min((n for n, _, _ in fitting), default=0)
    chosen: dict[tuple[str, ...], tuple[Way, Footprint]] = {}
    for n, way, found in fitting:
        if n == fewest:
            chosen.setdefault(tuple(way), (way, found))  # for the same settings, the first values are the nearest ones
    return list(chosen.values())[:_MOST_WAYS]


def _remedy_with_lora(footprint: Footprint, device_bytes: int) -> list[tuple[Way, Footprint]]:
    """Return changes that train the actor with LoRA of the default rank, in the form of `fitting_remedies`.

    Further settings change only if LoRA alone is not enough. With LoRA, a frozen reference model from the actor's own
    folder takes no memory, because it is the actor without its adapters.
    """
    if not footprint.may_adapt:
        return []
    actor, *others = footprint.models
    targets = tuple(linear_shapes(actor.config))
    lora = LoraSpec(adapters=AdapterSpec(LoraConfig().lora_rank, LoraConfig().lora_alpha, targets))
    others = [model for model in others if model.optimizer or model.config.head != "lm" or model.path != actor.path]
    adapted = replace(footprint, models=(replace(actor, lora=lora), *others), may_adapt=False)
    way: Way = {"actor.use_lora": True}
    if adapted.fits(device_bytes):
        return [(way, adapted)]
    return [({**way, **more}, found) for more, found in fitting_remedies(adapted, device_bytes)]


def _remedies_beside_lora(footprint: Footprint) -> Iterator[tuple[int, Way, Footprint]]:
    """Yield (number of kinds of changes, changes, footprint) for all memory-saving settings except LoRA.

    The least intrusive ones come first. zero_stage needs several data-parallel replicas.
    """
    now, tp_size, n_ranks = footprint, footprint.layout.tp_size, footprint.layout.world_size
    sizes = [size for size in range(tp_size, n_ranks + 1) if _can_divide(now, size)]
    shrinkable = [model for model in now.models if model.smaller_optimizer]
    to_host = [model for model in now.models if now.on_cuda and model.own_section in RESTING and not model.offload]
    to_stream = [model for model in now.models if now.on_cuda and model.gains_from_offload]
    stages, no_yes = range(now.zero_stage, 3), (False, True)
    for shrinks, streams, away, size, stage in itertools.product(no_yes, no_yes, no_yes, sizes, stages):
        divides_nothing = stage > now.zero_stage and size == n_ranks
        if (shrinks and not shrinkable) or (away and not to_host) or (streams and not to_stream) or divides_nothing:
            continue
        changes: list[Way] = [
            {"engine.zero_stage": stage} if stage != now.zero_stage else {},
            {"engine.tp_size": size} if size != tp_size else {},
            {f"{model.own_section}.offload": True for model in to_host} if away else {},
            {f"{model.own_section}.offload": True for model in to_stream} if streams else {},
            {f"{model.own_section}.optimizer.type": model.smaller_optimizer for model in shrinkable} if shrinks else {},
        ]
        models = tuple(
            _with_less_memory(model, (away and model in to_host) or (streams and model in to_stream), shrinks)
            for model in now.models
        )
        if n := sum(map(bool, changes)):
            way = {key: value for change in changes for key, value in change.items()}
            yield n, way, replace(now, models=models, layout=replace(now.layout, tp_size=size), zero_stage=stage)


def _with_less_memory(model: ModelFootprint, offload: bool, shrinks: bool) -> ModelFootprint:
    optimizer = model.optimizer
    if shrinks and optimizer and model.smaller_optimizer:
        optimizer = replace(optimizer, type=model.smaller_optimizer)
    return replace(model, offload=model.offload or offload, optimizer=optimizer)


def _can_divide(footprint: Footprint, tp_size: int) -> bool:
    divided = [size for model in footprint.models for size in model.config.sizes_divided_by_tp]
    sizes = [footprint.layout.world_size, *(size for _, name, size in divided if name != "num_key_value_heads")]
    heads = [model.config.num_kv_heads for model in footprint.models]
    shared = all(n % tp_size == 0 or tp_size % n == 0 for n in heads)
    return shared and not any(size % tp_size for size in sizes)


def _footprint_on_more_devices(footprint: Footprint, device_bytes: int) -> Footprint | None:
    """Return the first footprint that fits on 2, 4, 8, ... times as many devices, up to 64 devices in total.

    tp_size and zero_stage may change as well. Return None if nothing fits, or on a CPU.
    """
    size = footprint.layout.world_size
    if not footprint.on_cuda:  # more ranks would share the same memory of the machine
        return None
    while (size := 2 * size) <= _MOST_DEVICES:
        larger = replace(footprint, layout=replace(footprint.layout, world_size=size))
        for found in [
            larger,
            *(found for _, _, found in _remedies_beside_lora(larger) if found.models == larger.models),
        ]:
            if found.fits(device_bytes):
                return found
    return None


def _layout_change(footprint: Footprint) -> Way:
    return {
        "engine.world_size": footprint.layout.world_size,
        "engine.tp_size": footprint.layout.tp_size,
        "engine.zero_stage": footprint.zero_stage,
    }


def _remedy_text(way: Mapping[str, Any]) -> str:
    return " with ".join("{}={}" for _ in way) + " ({} GiB)"


def _value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def join_by_or(texts: Sequence[str]) -> str:
    return " or ".join([", ".join(texts[:-1])] * (len(texts) > 1) + [*texts[-1:]])


Option = tuple[Any, ...]
"""A change that lowers the need of memory: (text with a {} for each value, *values). Values are Keys or others."""

MORE_DEVICES: Option = ("divide the model over more devices ({})", Key("engine.tp_size"))
FEWER_AT_ONCE: Option = ("lower {}", Key("rollout.max_concurrent_rollouts"))


def loading_remedies(
    spec: EngineSpec, role: RoleSpec, others: Iterable[RoleSpec], *, has_bf16: bool, can_offload: bool
) -> Iterator[Option]:
    if spec.layout.dp_size > 1:
        yield ("raise {} to divide the model over more devices", Key("engine.tp_size"))
    else:
        yield ("divide the model over more devices with {} and {}", Key("engine.world_size"), Key("engine.tp_size"))
    if spec.dtype == "float32" and has_bf16:
        yield ("set {}=bfloat16", Key("actor.dtype"))
    if can_offload:
        for each in (role, *others):
            section = each.own_section
            if (section in RESTING and not each.offload) or each.gains_from_offload:
                yield ("set {}=true", Key(f"{section}.offload"))
    yield from _smaller_optimizer_options(role)
    if role.key == spec.actor.key and may_suggest_lora(spec):
        yield ("train adapters alone with {}=true", Key("actor.use_lora"))
    yield ("choose a smaller model ({})", Key(role.key))


def training_remedies(
    role: RoleSpec, mb_spec: MicroBatchSpec, *, recomputes: bool, beside: Iterable[Option], on_cuda: bool
) -> Iterator[Option]:
    section = role.section
    if mb_spec.max_tokens_per_mb is not None:
        yield ("lower {}", Key(f"{section}.mb_spec.max_tokens_per_mb"))
    elif mb_spec.mini_bs != 1:
        yield ("lower {}", Key(f"{section}.mb_spec.mini_bs"))
    if not recomputes:
        yield ("set {}=true", Key(f"{section}.gradient_checkpointing"))
    yield from beside
    if on_cuda and role.trains_weights and not role.offload:
        yield ("set {}=true", Key(f"{section}.offload"))
    yield from _smaller_optimizer_options(role)
    yield MORE_DEVICES


def rollout_remedies(decoder: DecoderConfig, *, on_cuda: bool) -> Iterator[Option]:
    yield from smaller_cache_options(decoder)
    yield ("lower {}", Key("rollout.max_prefill_tokens"))
    yield FEWER_AT_ONCE
    if may_verify_drafts(decoder, on_cuda=on_cuda):
        yield ("set {}=off, so that a step computes the logits of fewer tokens", Key("rollout.speculation"))
    if on_cuda and not decoder.eager_decode:
        yield ("set {}=true to do without CUDA graphs", Key("rollout.eager_decode"))


def smaller_cache_in_training_options(decoder: DecoderConfig) -> Iterator[Option]:
    yield ("free the KV cache between rollouts with {}=true", Key("rollout.drop_rollout_state"))
    yield from smaller_cache_options(decoder)


def smaller_cache_options(decoder: DecoderConfig) -> Iterator[Option]:
    if decoder.max_kv_tokens is None:
        yield ("lower {}", Key("rollout.mem_fraction"))
        yield ("set {}", Key("rollout.max_kv_tokens"))
    else:
        yield ("lower {}", Key("rollout.max_kv_tokens"))


def _smaller_optimizer_options(role: RoleSpec) -> Iterator[Option]:
    if role.smaller_optimizer:
        yield (f"set {{}}={role.smaller_optimizer}", Key(f"{role.section}.optimizer.type"))
