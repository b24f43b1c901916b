"""Who works with whom: ranks, tensor-parallel and data-parallel groups.

Rank r holds tensor shard r % tp_size of model copy r // tp_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from areno.engine.spec import EngineSpec
from areno.layers.parallel import TensorParallel

# Peers of a tensor-parallel group wait for their leader's next command inside a collective, however long that takes.
_FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class Place:
    """One process's place in the grid. `dp` has the collectives of TensorParallel, over the model copies."""

    rank: int
    device: torch.device
    tp: TensorParallel
    dp: TensorParallel
    control: Any = None  # gloo group of the tensor-parallel peers, for commands

    @property
    def leads(self) -> bool:
        """The leader takes commands for its tensor-parallel group and answers for it."""
        return self.tp.rank == 0


def take_place(spec: EngineSpec, rank: int, rendezvous: str) -> Place:
    """Join the process groups of `spec`; `rendezvous` is a torch.distributed init_method all ranks share."""
    device = torch.device(spec.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if spec.world_size == 1:
        return Place(rank, device, TensorParallel(), TensorParallel())
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=spec.world_size,
        timeout=_FOREVER,
        device_id=device if device.type == "cuda" else None,
    )
    tp_ranks = [list(range(d * spec.tp_size, (d + 1) * spec.tp_size)) for d in range(spec.dp_size)]
    dp_ranks = [list(range(t, spec.world_size, spec.tp_size)) for t in range(spec.tp_size)]
    tp, control = TensorParallel(), None
    for ranks in tp_ranks:  # every rank takes part in making every group
        group, gloo = dist.new_group(ranks), dist.new_group(ranks, backend="gloo", timeout=_FOREVER)
        if rank in ranks:
            tp, control = TensorParallel(ranks.index(rank), len(ranks), group), gloo
    dp = TensorParallel()
    for ranks in dp_ranks:
        group = dist.new_group(ranks)
        if rank in ranks:
            dp = TensorParallel(ranks.index(rank), len(ranks), group)
    return Place(rank, device, tp, dp, control)


def leave() -> None:
    """Undo take_place."""
    if dist.is_initialized():
        dist.destroy_process_group()
