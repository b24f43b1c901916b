"""Which ranks work together: the tensor-parallel and data-parallel groups of one worker.

Rank r holds tensor shard r % tp_size of model copy r // tp_size.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from areno.engine.spec import EngineSpec
from areno.layers.parallel import ParallelGroup

# Peers of a tensor-parallel group wait for their leader's next command inside a collective, however long that takes.
_FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class ParallelContext:
    """The groups that one worker belongs to.

    tp: the ranks that share one copy of the model. dp: the ranks that hold the same piece of the other copies.
    control: gloo group of the tensor-parallel peers, for commands; None without peers.
    """

    rank: int
    device: torch.device
    tp: ParallelGroup
    dp: ParallelGroup
    control: Any = None

    @property
    def leads(self) -> bool:
        """The leader takes commands for its tensor-parallel group and answers for it."""
        return self.tp.rank == 0


def join_groups(spec: EngineSpec, rank: int, port: int = 0, listener: socket.socket | None = None) -> ParallelContext:
    """Join the process groups of `spec`. A collective call over all ranks.

    port: where they meet, on the host of rank 0. listener: for rank 0, the socket that listens there. One rank alone
    needs neither.
    """
    device = torch.device(spec.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if spec.world_size == 1:
        return ParallelContext(rank, device, ParallelGroup(), ParallelGroup())
    store = dist.TCPStore(
        spec.addresses[0].host,
        port,
        spec.world_size,
        is_master=rank == 0,
        timeout=_FOREVER,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=spec.world_size,
        timeout=_FOREVER,
        device_id=device if device.type == "cuda" else None,
    )
    tp_ranks = [list(range(d * spec.tp_size, (d + 1) * spec.tp_size)) for d in range(spec.dp_size)]
    dp_ranks = [list(range(t, spec.world_size, spec.tp_size)) for t in range(spec.tp_size)]
    tp, control = ParallelGroup(), None
    for ranks in tp_ranks:  # every rank takes part in making every group
        group, gloo = dist.new_group(ranks), dist.new_group(ranks, backend="gloo", timeout=_FOREVER)
        if rank in ranks:
            tp, control = ParallelGroup(ranks.index(rank), len(ranks), group), gloo
    dp = ParallelGroup()
    for ranks in dp_ranks:
        group = dist.new_group(ranks)
        if rank in ranks:
            dp = ParallelGroup(ranks.index(rank), len(ranks), group)
    return ParallelContext(rank, device, tp, dp, control)


def leave_groups() -> None:
    """Undo join_groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
