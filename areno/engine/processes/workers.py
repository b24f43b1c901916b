"""The forms of a group of workers: one worker in the driver's process, or a process for each device, here or elsewhere.

They have the same methods.
"""

from __future__ import annotations

from functools import partial

from areno.engine.processes.inline import InlineGroup
from areno.engine.processes.spawned import SpawnedGroup
from areno.engine.spec import EngineSpec
from areno.errors import EngineError, Key

WorkerGroup = InlineGroup | SpawnedGroup


def start_workers(spec: EngineSpec, mode: str, again: bool = False) -> WorkerGroup:
    """The group for a spec. Its own `spec` is what it has become of the given one.

    mode: engine.workers, that is auto (inline for one CPU device), inline or spawn; or ray, on the nodes of a Ray
    cluster. again: a group of this spec has lost a worker. Where its nodes are gone, there may be fewer copies of the
    model.
    """
    if mode == "ray":
        from areno.engine.processes.on_ray.processes import RayProcesses

        return SpawnedGroup(spec, partial(RayProcesses, again=again))
    if mode == "inline" and spec.world_size > 1:
        raise EngineError(
            "{}=inline holds one device, not {}; use spawn", Key("engine.workers"), ", ".join(spec.devices)
        )
    if mode == "inline" or (mode == "auto" and spec.devices == ["cpu"]):
        return InlineGroup(spec)
    return SpawnedGroup(spec)
