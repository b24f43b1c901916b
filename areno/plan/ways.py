"""Changes of settings with which a run fits the memory of its devices, each with its price."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areno.config.experiments import CriticExperimentConfig, ExperimentConfig, PolicyExperimentConfig
from areno.errors import ArenoError
from areno.plan.forecast import Forecast

_MOST = 6
_RESTING = ("ref", "reward", "critic")


@dataclass(frozen=True, kw_only=True)
class Way:
    """Changes of settings with which a run fits.

    Attributes:
        changes: Setting -> new value. "devices" stands for the number of devices.
        price: Description of the costs of these changes.
        forecast: The forecast with these changes.
    """

    changes: Mapping[str, Any]
    price: str
    forecast: Forecast


@dataclass(frozen=True)
class _Option:
    """One change that lowers the need for memory.

    Attributes:
        changes: Setting -> new value.
        price: Description of the cost, apart from time.
        learns_otherwise: Whether the change has an influence on learning, so that other changes come first.
    """

    changes: dict[str, Any]
    price: str = ""
    learns_otherwise: bool = False


def ways_to_fit(found: Forecast, predict: Callable[[ExperimentConfig, int], Forecast]) -> list[Way]:
    """Return changes of settings with which a run fits, the best ones first.

    Changes on the same number of devices come first, then changes without influence on learning, then those with the
    shortest step. Pairs of changes are tried only if at most one single change is enough. A setting that already has
    the value is not among the changes.

    Args:
        found: The forecast of a run that does not fit.
        predict: Function from (configuration, number of devices) to a forecast.
    """
    options = list(_options(found))
    ways: list[tuple[bool, Way]] = []
    for n in (1, 2):
        for chosen in itertools.combinations(options, n):
            changes = {key: value for option in chosen for key, value in option.changes.items()}
            if len(changes) < sum(len(option.changes) for option in chosen):
                continue
            config, n_devices = copy.deepcopy(found.config), changes.get("devices", found.n_devices)
            set_values(config, {key: value for key, value in changes.items() if key != "devices"})
            try:
                other = predict(config, n_devices)
            except ArenoError:  # such as a layout that does not divide the model
                continue
            if other.fits:
                price = "; ".join(option.price for option in chosen if option.price)
                ways.append(
                    (any(o.learns_otherwise for o in chosen), Way(changes=changes, price=price, forecast=other))
                )
        if len(ways) >= 2:
            break
    ways.sort(key=lambda pair: (pair[1].forecast.n_devices, pair[0], pair[1].forecast.seconds))
    return [way for _, way in ways[:_MOST]]


def _options(found: Forecast) -> Iterator[_Option]:
    """Yield single changes that lower the need for memory and are not in effect."""
    config, cuda = found.config, found.hardware.is_cuda
    trained = {"actor": config.actor}
    if isinstance(config, CriticExperimentConfig):
        trained["critic"] = config.critic  # type: ignore[assignment]
    if to_codes := [name for name, section in trained.items() if section.optimizer.type == "adam"]:
        changes = {f"{name}.optimizer.type": "adam_8bit" for name in to_codes}
        yield _Option(changes, "moments are rounded to 8 bits")
    if isinstance(config, PolicyExperimentConfig):
        if cuda and not config.rollout.drop_rollout_state:
            yield _Option({"rollout.drop_rollout_state": True}, "the KV cache and CUDA graphs are made in each step")
        at_once = config.rollout.max_concurrent_rollouts or config.rows_per_step
        for share in (2, 4):
            if at_once // share >= 1:
                yield _Option({"rollout.max_concurrent_rollouts": at_once // share}, "fewer samples decode at once")
        if config.gconfig.max_new_tokens > 512:
            less = config.gconfig.max_new_tokens // 2
            yield _Option({"gconfig.max_new_tokens": less}, "longer answers are cut off", learns_otherwise=True)
    if cuda:
        for name in _RESTING:
            loaded = next((model for model in found.footprint.models if model.name == name), None)
            if loaded is not None and not loaded.offload:
                yield _Option({f"{name}.offload": True}, f"the {name} model is copied to the device in each step")
    if any(model.may_stream for model in found.footprint.models):
        actor = found.footprint.of_model(found.footprint.models[0])
        price = f"{(actor.masters + actor.moments) / 2**30:.0f} GiB of host memory for each device"
        yield _Option({"actor.offload": True}, price)
    if not config.actor.gradient_checkpointing:
        yield _Option({"actor.gradient_checkpointing": True}, "activations are computed twice")
    if not config.actor.use_lora and not config.actor.init_from_scratch:
        yield _Option({"actor.use_lora": True}, "only adapters are trained", learns_otherwise=True)
    if cuda:
        yield from _layouts(found)


def _layouts(found: Forecast) -> Iterator[_Option]:
    """Yield other divisions of the models over the devices, and over more devices."""
    engine, n = found.config.engine, found.n_devices
    if n > 1 and engine.zero_stage < 2:
        yield _Option({"engine.zero_stage": 2}, "gradients are sent in each micro-batch")
    if n > 1:
        yield from (
            _Option({"engine.tp_size": size}, "layers wait for each other's sums")
            for size in (2, 4, 8)
            if engine.tp_size < size <= n and n % size == 0
        )
    for more in (2, 4, 8):
        if more * n <= 64:
            yield _Option({"devices": more * n, "engine.zero_stage": 2}, f"{more * n} devices")
            if more <= 8:
                yield _Option({"devices": more * n, "engine.tp_size": engine.tp_size * more}, f"{more * n} devices")


def set_values(config: ExperimentConfig, changes: Mapping[str, Any]) -> None:
    """Set values of settings in a configuration, without a check of the values.

    Args:
        config: The configuration, which is changed.
        changes: Dotted name of a setting -> new value.
    """
    for key, value in changes.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = vars(target)[section]
        vars(target)[name] = value


def shown(changes: Mapping[str, Any]) -> str:
    """Return changes as words of a command line, such as "actor.use_lora=true --devices 2".

    Args:
        changes: Setting -> new value.
    """
    words = []
    for key, value in changes.items():
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"--devices {text}" if key == "devices" else f"{key}={text}")
    return " ".join(words)
