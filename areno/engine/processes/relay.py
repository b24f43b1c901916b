"""From the leader of a tensor-parallel group to its peers: what to do before the next step of decoding.

A message goes out at every step, mostly an empty one, so it has to be cheap. It goes one way: the leader waits for
nobody. The ranks of a group are on one machine.
"""

from __future__ import annotations

import json
import pickle
import secrets
from multiprocessing.connection import Client, Connection, Listener
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

_NOTHING = b""


class Relay:
    """One rank's end: the leader, rank 0, has a connection to each peer, and a peer one to the leader."""

    def __init__(self, store: dist.Store, name: str, rank: int, size: int):
        """A collective call over the ranks of the group. name: of the group, in the store where they meet."""
        self._leads = rank == 0
        if self._leads:
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

    def share(self, messages: list[Any]) -> list[Any]:
        """The leader's messages, on each rank. EOFError on a peer whose leader has ended."""
        if self._leads:
            packed = pickle.dumps(messages) if messages else _NOTHING
            for connection in self._connections:
                connection.send_bytes(packed)
            return messages
        packed = self._connections[0].recv_bytes()
        return pickle.loads(packed) if packed else []
