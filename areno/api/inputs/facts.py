"""What a run says of itself when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areno.api.inputs.plan import TrainerPlan
from areno.config.experiments import ExperimentConfig, PolicyExperimentConfig
from areno.data.loader import BatchLoader
from areno.engine.spec import RoleSpec

_LOOKED_AT = 1000  # rows


def facts(
    config: ExperimentConfig, plan: TrainerPlan, roles: Mapping[str, RoleSpec], loader: BatchLoader[Any]
) -> dict[str, str]:
    """The models, the training rows and the devices, in words. roles: the models beside the actor."""
    spec, n_devices = plan.spec, len(plan.spec.devices)
    others = [f"{name} ({'the same' if of.path == spec.model_path else of.path})" for name, of in roles.items()]
    step = f"{loader.config.batch_size} a step"
    if isinstance(config, PolicyExperimentConfig):
        step += f", {config.gconfig.n_samples} samples of each"
    layout = ", ".join(spec.devices) if n_devices < 3 else f"{n_devices} devices"
    if spec.n_nodes > 1:
        layout += f" on {spec.n_nodes} nodes"
    if spec.tp_size > 1:
        layout += f": {n_devices // spec.tp_size} copies over {spec.tp_size} devices each"
    return {
        "model": " + ".join([config.actor.path, *others]),
        "rows": f"{len(loader.rows):,} of {loader.name}, {step}",
        "layout": f"{layout}, {spec.dtype}",
    }


def without_answers(loader: BatchLoader[Any]) -> str:
    """Which rows have no solutions, in words; "" if some have. Of many rows it looks at the first ones."""
    count = min(len(loader.rows), _LOOKED_AT)
    if any(loader.rows[index].get("solutions") is not None for index in range(count)):
        return ""
    return (
        f"no row of {loader.name}" if count == len(loader.rows) else f"none of the first {count} rows of {loader.name}"
    )
