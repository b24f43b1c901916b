"""Changes of settings that make a run fit into the memory of its devices, and the price of each change."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.config.experiments import ExperimentConfig
from areno.config.optimizers import OPTIMIZERS, OptimizerType
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.cost.footprint import RESTING
from areno.errors import ArenoError
from areno.plan.forecast import Forecast

_MOST, _MOST_HERE = 6, 4  # ways in all, and ways on the same number of devices
_FASTER = 0.97  # share of the time of one change that a second change must reach to be worth listing
_FEW = 3  # ways; if there are fewer, pairs with many devices are tried, too
_DEVICES = "engine.world_size"


@dataclass(frozen=True, kw_only=True)
class FittingChange:
    changes: Mapping[str, Any]
    price: str  # for messages
    learns_otherwise: bool
    forecast: Forecast


@dataclass(frozen=True)
class _MemoryOption:
    changes: dict[str, Any]
    price: str = ""  # apart from time and host memory
    learns_otherwise: bool = False  # other changes come first


def fitting_changes(found: Forecast, predict: Callable[[ExperimentConfig, int], Forecast]) -> list[FittingChange]:
    """Return changes, each of one or two settings, with which a run fits, the best ones first.

    Changes on the same number of devices come first, then those that do not affect what the model learns, then those
    with the shortest step. A pair is left out if one of its two changes is enough and about as fast.
    """
    here, layouts = list(_memory_options(found)), list(_layout_options(found)) if found.hardware.is_cuda else []
    ways = _combinations_that_fit(found, [(option,) for option in [*here, *layouts]], predict)
    on_twice = [option for option in layouts if option.changes.get(_DEVICES) == 2 * found.n_devices]
    ways += _combinations_that_fit(found, itertools.combinations(here, 2), predict)
    ways += _combinations_that_fit(found, itertools.product(here, on_twice), predict)
    if len(ways) < _FEW:
        ways += _combinations_that_fit(found, itertools.product(here, layouts), predict)
    ways = list({tuple(way.changes.items()): way for way in ways}.values())
    ways = [way for way in ways if not any(_dominates(other, way) for other in ways)]
    ways.sort(key=lambda way: (way.forecast.n_devices, way.learns_otherwise, way.forecast.step_seconds))
    on_same = [way for way in ways if way.forecast.n_devices == found.n_devices]
    on_more = [way for way in ways if way.forecast.n_devices > found.n_devices]
    chosen = on_same[: max(_MOST_HERE, _MOST - len(on_more))]
    return [*chosen, *on_more[: _MOST - len(chosen)]]


def _combinations_that_fit(
    found: Forecast, choices: Iterable[Sequence[_MemoryOption]], predict: Callable[[ExperimentConfig, int], Forecast]
) -> list[FittingChange]:
    ways = []
    for chosen in choices:
        changes = {key: value for option in chosen for key, value in option.changes.items()}
        if len(changes) < sum(len(option.changes) for option in chosen):
            continue  # two values for one setting
        config = copy.deepcopy(found.config)
        set_values(config, changes)
        try:
            other = predict(config, changes.get(_DEVICES, found.n_devices))
        except ArenoError:  # such as a layout that does not divide the model
            continue
        if other.fits:
            prices = [option.price for option in chosen if option.price]
            if other.host_bytes > found.host_bytes:
                prices.append(f"{other.host_bytes / 2**30:.0f} GiB of host memory")
            learns = any(option.learns_otherwise for option in chosen)
            ways.append(
                FittingChange(changes=changes, price="; ".join(prices), learns_otherwise=learns, forecast=other)
            )
    return ways


def _dominates(one: FittingChange, other: FittingChange) -> bool:
    """Return whether `one` makes `other` superfluous: `other` has further changes and is hardly faster."""
    more = one.changes.items() < other.changes.items()
    return more and other.forecast.step_seconds > _FASTER * one.forecast.step_seconds


def _memory_options(found: Forecast) -> Iterator[_MemoryOption]:
    """Yield single changes, not yet in effect, that lower the need for memory."""
    config, cuda = found.config, found.hardware.is_cuda
    smaller: dict[str, OptimizerType | None] = {
        name: OPTIMIZERS[model.optimizer.type].smaller for name, model in config.trained_models().items()
    }
    if changes := {f"{name}.optimizer.type": kind for name, kind in smaller.items() if kind is not None}:
        prices = dict.fromkeys(OPTIMIZERS[kind].price for kind in smaller.values() if kind is not None)
        yield _MemoryOption({**changes}, "; ".join(prices))
    if isinstance(config, PolicyExperimentConfig):
        if cuda and not config.rollout.drop_rollout_state:
            yield _MemoryOption(
                {"rollout.drop_rollout_state": True}, "the KV cache and CUDA graphs are made in each step"
            )
        for share in (2, 4):
            if at_once := config.max_concurrent_samples // share:
                yield _MemoryOption({"rollout.max_concurrent_rollouts": at_once}, "fewer samples decode at once")
        if config.gconfig.max_new_tokens > 512:
            less = config.gconfig.max_new_tokens // 2
            yield _MemoryOption({"gconfig.max_new_tokens": less}, "longer answers are cut off", learns_otherwise=True)
    if cuda:
        for name in RESTING:
            loaded = next((model for model in found.footprint.models if model.own_section == name), None)
            if loaded is not None and not loaded.offload:
                yield _MemoryOption(
                    {f"{name}.offload": True}, f"the {loaded.name} model is copied to the device in each step"
                )
    if any(model.gains_from_offload for model in found.footprint.models):
        yield _MemoryOption({"actor.offload": True}, "masters and moments are copied in each update")
        if len(found.footprint.models) > 1:
            yield _MemoryOption({"enable_offload": True}, "models rest in host memory while others work")
    if not config.actor.gradient_checkpointing:
        yield _MemoryOption({"actor.gradient_checkpointing": True}, "activations are computed twice")
    if not config.actor.use_lora and not config.actor.init_from_scratch:
        yield _MemoryOption({"actor.use_lora": True}, "only adapters are trained", learns_otherwise=True)


def _layout_options(found: Forecast) -> Iterator[_MemoryOption]:
    engine, n = found.config.engine, found.n_devices
    if n > 1 and engine.zero_stage < 2:
        yield _MemoryOption({"engine.zero_stage": 2}, "gradients are sent in each micro-batch")
    if n > 1:
        yield from (
            _MemoryOption({"engine.tp_size": size}, "layers wait for each other's sums")
            for size in (2, 4, 8)
            if engine.tp_size < size <= n and n % size == 0
        )
    for more in (2, 4, 8):
        if more * n <= 64:
            yield _MemoryOption({_DEVICES: more * n, "engine.zero_stage": 2}, f"{more * n} devices")
            yield _MemoryOption({_DEVICES: more * n, "engine.tp_size": engine.tp_size * more}, f"{more * n} devices")


def set_values(config: ExperimentConfig, changes: Mapping[str, Any]) -> None:
    """Set values of settings by their dotted names, without a check of the values."""
    for key, value in changes.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = vars(target)[section]
        vars(target)[name] = value


def command_line_of(changes: Mapping[str, Any]) -> str:
    """Return changes as arguments of a command line, such as "actor.use_lora=true engine.world_size=2"."""
    words = []
    for key, value in changes.items():
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"{key}={text}")
    return " ".join(words)
