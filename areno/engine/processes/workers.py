"""The two forms of a group of workers: one worker in the driver's process, or a process for each device.

They have the same methods.
"""

from __future__ import annotations

from areno.engine.processes.inline import InlineGroup
from areno.engine.processes.spawned import SpawnedGroup
from areno.engine.spec import EngineSpec
from areno.errors import EngineError, Key

WorkerGroup = InlineGroup | SpawnedGroup


def start_workers(spec: EngineSpec, mode: str) -> WorkerGroup:
    """The group for a spec; `mode` is engine.workers: auto (inline for one CPU device), inline or spawn."""
    if mode == "inline" and spec.world_size > 1:
        raise EngineError(
            "{}=inline holds one device, not {}; use spawn", Key("engine.workers"), ", ".join(spec.devices)
        )
    if mode == "inline" or (mode == "auto" and spec.devices == ["cpu"]):
        return InlineGroup(spec)
    return SpawnedGroup(spec)
