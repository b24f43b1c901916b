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
    states: gloo group of all ranks, for the thread that writes run states; None for one rank alone.
    n_beside: ranks on the same machine, itself included.
    """

    rank: int
    device: torch.device
    tp: ParallelGroup
    dp: ParallelGroup
    control: Any = None
    states: Any = None
    n_beside: int = 1

    @property
    def world_size(self) -> int:
        return self.tp.size * self.dp.size

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
    size, socket_fd = spec.world_size, None if listener is None else listener.detach()
    store = dist.TCPStore(
        spec.addresses[0].host,
        port,
        size,
        rank == 0,
        timeout=_FOREVER,
        wait_for_workers=False,
        master_listen_fd=socket_fd,
    )
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER, device_id=device_id)
    ranks = torch.arange(size).view(spec.dp_size, spec.tp_size)
    tp_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    dp_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    control, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), backend="gloo", timeout=_FOREVER)
    states = dist.new_group(backend="gloo", timeout=_FOREVER)
    dp_rank, tp_rank = divmod(rank, spec.tp_size)
    tp = ParallelGroup(tp_rank, spec.tp_size, tp_group, in_order=spec.exact)
    dp = ParallelGroup(dp_rank, spec.dp_size, dp_group)
    return ParallelContext(rank, device, tp, dp, control, states, spec.n_beside(rank))
