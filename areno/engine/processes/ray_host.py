"""The Ray actor on each node of a cluster. It starts the node's worker processes and forwards their messages.

Messages are forwarded as bytes, without unpickling them.
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from areno.engine.processes.local import Arrived, LocalProcesses
from areno.specs.engine import LOOPBACK, EngineSpec
from areno.version import __version__

VERSIONS_OF = ("torch", "transformers")
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class NodeReport:
    """Facts about a node, to check before workers start there."""

    id: str
    host: str
    versions: dict[str, str]
    missing: list[str]  # the requested paths that do not exist on the node
    n_cuda: int = 0  # that torch sees among those that Ray has assigned to the run


class NodeHost:
    """Ray actor that holds the worker processes on one node.

    Methods in different concurrency groups of Ray (GROUPS: name -> number of threads) run at the same time. The
    environment variables `environment` are set unless the node has other values. `folder` becomes the working directory
    if it exists. Before `start`, methods return empty results.
    """

    GROUPS = {"commands": 1, "messages": 1, "watch": 2}  # noqa: RUF012

    def __init__(self, environment: Mapping[str, str], folder: str):
        # Ray sets this variable for its own tasks, from the CPUs that the actor has reserved.
        os.environ.pop("OMP_NUM_THREADS", None)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if os.path.isdir(folder):
            os.chdir(folder)
        self._listener: socket.socket | None = None
        self._processes: LocalProcesses | None = None

    def report(self, paths: Iterable[str]) -> NodeReport:
        import ray
        import torch

        context = ray.get_runtime_context()
        missing = [path for path in paths if not os.path.exists(path)]
        n_cuda = torch.cuda.device_count()
        return NodeReport(context.get_node_id(), ray.util.get_node_ip_address(), versions(), missing, n_cuda)

    def listen(self, host: str) -> int:
        """Open the rendezvous port on the node of rank 0, and return it."""
        self._listener = socket.create_server((host, 0))
        return self._listener.getsockname()[1]

    def start(self, spec: EngineSpec, ranks: range, port: int) -> None:
        own = spec.addresses[ranks[0]].host
        if spec.n_nodes > 1 and own != LOOPBACK and (interface := interface_of(own)) is not None:
            # With several network interfaces, gloo and NCCL may choose an interface that the other nodes cannot reach.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, interface)
        self._processes = LocalProcesses(spec, ranks, port, self._listener)
        if self._listener is not None:
            self._listener.close()

    def send(self, rank: int, command: bytes) -> None:
        """Send a pickled Command to one worker. Ignore a worker that has ended, since `receive` reports it."""
        if self._processes is not None:
            with suppress(OSError):
                self._processes.send_bytes(rank, command)

    def receive(self, timeout: float) -> tuple[Arrived, list[int]]:
        """Return messages, ended ranks, and the counters of all ranks. Only counters of this node's ranks are valid."""
        if (processes := self._processes) is None:
            return ([], []), []
        arrived = processes.receive(timeout)
        return arrived, list(processes.counters)

    def exit_codes(self, rank: int | None, timeout: float) -> dict[int, int | None]:
        return {} if self._processes is None else self._processes.exit_codes(rank, timeout)

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        return {} if self._processes is None else self._processes.stack_traces()

    def kill(self) -> None:
        if self._processes is not None:
            self._processes.kill()

    def close(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()


def versions() -> dict[str, str]:
    """Return the versions of areno, Python, torch and transformers on this node, by name.

    They must be equal on all nodes. So the patch version of Python and suffixes such as `+cu126` are left out: builds
    of torch for different accelerators count as equal.
    """
    major, minor, _ = platform.python_version_tuple()
    found = {name: _version(name).partition("+")[0] for name in VERSIONS_OF}
    return {"areno": __version__, "python": f"{major}.{minor}", **found}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def interface_of(host: str) -> str | None:
    """Return the name of the network interface with an IPv4 address, such as "eth0"."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None


def create_probe_file(folder: str) -> Path:
    """Create an empty file by which other nodes check that they share the folder. The caller deletes it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=".seen-", dir=folder)
    os.close(number)
    return Path(name)


def start_actor(ray: Any, options: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    actor = ray.remote(**options, concurrency_groups=NodeHost.GROUPS, max_restarts=0)(NodeHost)
    return actor.remote(environment, os.getcwd())
