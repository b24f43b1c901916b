"""The process groups that one worker belongs to: tensor-parallel, data-parallel and context-parallel.

`Layout` maps each global rank to its replica of the model and its shard of the replica. A CommandBroadcast sends the
driver's commands from the leader of a tensor-parallel group (its rank 0) to the other ranks before each decoding step.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from areno.kernels.symmetric_memory import open_symmetric_memory
from areno.layers.parallel import ParallelGroup
from areno.specs.engine import EngineSpec

_NOTHING = b""


class CommandBroadcast:
    """Broadcasts commands from the leader (rank 0) of a tensor-parallel group to the other ranks of the group.

    All ranks call `send` at every decoding step, mostly with no commands, so a call must be cheap. The leader never
    waits for an answer. All ranks of a group run on one machine.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int):
        """Connect the ranks of a group, which must all call this. `name` is unique in the store."""
        self._is_leader = rank == 0
        if self._is_leader:
            key = secrets.token_hex(32)
            # The folder is needed until all ranks have connected, and is then deleted.
            with (
                TemporaryDirectory(prefix="areno-") as folder,
                Listener(f"{folder}/s", authkey=key.encode()) as listener,
            ):
                store.set(f"relay/{name}", json.dumps([listener.address, key]))
                self._connections: list[Connection[Any, Any]] = [listener.accept() for _ in range(size - 1)]
        else:
            address, key = json.loads(store.get(f"relay/{name}"))
            self._connections = [Client(address, authkey=key.encode())]

    def send(self, messages: list[Any]) -> list[Any]:
        """Return the leader's messages on every rank. Raises EOFError if the leader has ended."""
        if self._is_leader:
            packed = pickle.dumps(messages) if messages else _NOTHING
            for connection in self._connections:
                connection.send_bytes(packed)
            return messages
        packed = self._connections[0].recv_bytes()
        return pickle.loads(packed) if packed else []


# The driver notices a rank that fails or hangs, so collectives have no time limit of their own.
_FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class ParallelContext:
    """The process groups that one worker belongs to."""

    rank: int
    device: torch.device
    tp: ParallelGroup
    dp: ParallelGroup  # holds the same shard in all copies of the model
    cp: ParallelGroup  # part of `dp` that splits the tokens of each row
    data: ParallelGroup  # part of `dp` that trains different rows: one rank of each `cp`
    broadcast: CommandBroadcast | None = None  # None if `tp` has one rank
    states: Any = None  # gloo group of all ranks, for the thread that writes training states

    @property
    def world_size(self) -> int:
        return self.tp.size * self.dp.size

    @property
    def is_leader(self) -> bool:
        """Return whether this rank receives the driver's commands for its tensor-parallel group."""
        return self.tp.rank == 0


def join_groups(spec: EngineSpec, rank: int, port: int = 0, listener: socket.socket | None = None) -> ParallelContext:
    """Join the process groups of a run. All ranks must call this. A single rank uses no torch.distributed."""
    device = torch.device(spec.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if spec.world_size == 1:
        alone = ParallelGroup()
        return ParallelContext(rank, device, alone, alone, alone, alone)
    layout, size, socket_fd = spec.layout, spec.world_size, None if listener is None else listener.detach()
    store = dist.TCPStore(
        spec.addresses[0].host,
        port,
        size,
        rank == 0,
        timeout=_FOREVER,
        wait_for_workers=False,
        master_listen_fd=socket_fd,
    )
    # NCCL would register the tensors of CUDA graphs with other GPUs, which fails for tensors in expandable segments.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER, device_id=device_id)
    ranks = torch.arange(size).view(layout.n_data_parallel_groups, layout.cp_size, -1)
    tp_group, _ = dist.new_subgroups_by_enumeration(ranks.flatten(0, 1).tolist())
    dp_group, _ = dist.new_subgroups_by_enumeration(ranks.flatten(0, 1).T.tolist())
    states = dist.new_group(backend="gloo", timeout=_FOREVER)
    (dp_rank, tp_rank), together, exact = layout.replica_and_shard(rank), layout.replica_ranks(rank), spec.engine.exact
    symmetric_memory = None
    hosts = {spec.addresses[each].host for each in together}
    if layout.is_sharded and device.type == "cuda" and len(hosts) == 1 and (len(together) == 2 or not exact):
        symmetric_memory = open_symmetric_memory(tp_group, device)
    tp = ParallelGroup(tp_rank, len(together), tp_group, in_order=exact, symmetric_memory=symmetric_memory)
    dp = ParallelGroup(dp_rank, layout.dp_size, dp_group)
    cp, data = ParallelGroup(), dp
    if layout.cp_size > 1:
        data_rank, cp_rank = divmod(dp_rank, layout.cp_size)
        cp_group, _ = dist.new_subgroups_by_enumeration(ranks.transpose(1, 2).flatten(0, 1).tolist())
        data_group, _ = dist.new_subgroups_by_enumeration(ranks.flatten(1).T.tolist())
        cp = ParallelGroup(cp_rank, layout.cp_size, cp_group)
        data = ParallelGroup(data_rank, layout.n_data_parallel_groups, data_group)
    broadcast = CommandBroadcast(store, str(dp_rank), tp_rank, len(together)) if layout.is_sharded else None
    return ParallelContext(rank, device, tp, dp, cp, data, broadcast, states)
