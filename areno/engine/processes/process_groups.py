"""The parallel groups of one worker: tensor-parallel, data-parallel and context-parallel ranks.

`Layout` says which shard of which copy each rank holds. A CommandBroadcast passes the commands of the
driver from the leader of a tensor-parallel group to its other ranks before each decoding step.
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

from areno.engine.spec import EngineSpec
from areno.kernels.symmetric_memory import open_symmetric_memory
from areno.layers.parallel import ParallelGroup

_NOTHING = b""


class CommandBroadcast:
    """The connection of one rank to the leader of its tensor-parallel group; for the leader, to all other ranks.

    A message is sent at every decoding step and is mostly empty, so sending must be cheap. The leader never waits for
    an answer. All ranks of a group run on one machine.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int):
        """Connect the ranks of a group. All of them must call this.

        Args:
            store: Store at which the ranks meet.
            name: Name of the group in the store.
            rank: Rank in the group. Rank 0 is the leader.
            size: Number of ranks.
        """
        self._is_leader = rank == 0
        if self._is_leader:
            key = secrets.token_hex(32)
            # The folder is needed until all have come; nothing is left of it then.
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
        """Return the messages of the leader on each rank of the group.

        Raises:
            EOFError: The leader has ended.
        """
        if self._is_leader:
            packed = pickle.dumps(messages) if messages else _NOTHING
            for connection in self._connections:
                connection.send_bytes(packed)
            return messages
        packed = self._connections[0].recv_bytes()
        return pickle.loads(packed) if packed else []


# A rank that fails or hangs is seen by the driver; no collective has a time limit of its own.
_FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class ParallelContext:
    """The groups that one worker belongs to.

    Attributes:
        rank: Global rank of the worker.
        device: Its device.
        tp: Ranks that share one copy of the model (tensor parallel).
        dp: Ranks that hold the same shard of all copies (data parallel).
        cp: Ranks of `dp` that train each row together (context parallel).
        data: Ranks of `dp` with the same position in the other context-parallel groups.
        broadcast: Passes commands on to the other tensor-parallel ranks. None for a group of one.
        states: Gloo group of all ranks for the thread that writes run states. None for a run of one rank.
        n_ranks_on_machine: Number of ranks on this machine, this one included.
    """

    rank: int
    device: torch.device
    tp: ParallelGroup
    dp: ParallelGroup
    cp: ParallelGroup
    data: ParallelGroup
    broadcast: CommandBroadcast | None = None
    states: Any = None
    n_ranks_on_machine: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.tp.size * self.dp.size

    @property
    def is_leader(self) -> bool:
        """Whether this rank takes commands for its tensor-parallel group and answers for it."""
        return self.tp.rank == 0


def join_groups(spec: EngineSpec, rank: int, port: int = 0, listener: socket.socket | None = None) -> ParallelContext:
    """Join the process groups of a run. All ranks must call this.

    Args:
        spec: Description of all workers.
        rank: Global rank of this worker.
        port: Port on the host of rank 0 at which all ranks meet.
        listener: For rank 0, the socket that listens at the port. A run of one rank needs neither.
    """
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
    # NCCL would register the tensors of CUDA graphs with the other GPUs, which fails for those in expandable segments.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER, device_id=device_id)
    ranks = torch.arange(size).view(layout.data_size, layout.cp_size, -1)
    tp_group, _ = dist.new_subgroups_by_enumeration(ranks.flatten(0, 1).tolist())
    dp_group, _ = dist.new_subgroups_by_enumeration(ranks.flatten(0, 1).T.tolist())
    states = dist.new_group(backend="gloo", timeout=_FOREVER)
    (dp_rank, tp_rank), together, exact = layout.place_of(rank), layout.copy_of(rank), spec.engine.exact
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
        data = ParallelGroup(data_rank, layout.data_size, data_group)
    broadcast = CommandBroadcast(store, str(dp_rank), tp_rank, len(together)) if layout.is_sharded else None
    return ParallelContext(rank, device, tp, dp, cp, data, broadcast, states, spec.n_ranks_on_machine(rank))
