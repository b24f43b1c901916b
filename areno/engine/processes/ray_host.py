"""The actor on each node of a Ray cluster. It starts the worker processes there and forwards their messages unread."""

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

from areno import __version__
from areno.engine.processes.local import Arrived, LocalProcesses
from areno.engine.spec import LOOPBACK, EngineSpec

VERSIONS_OF = ("torch", "transformers")
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class NodeReport:
    """Facts about a node.

    Attributes:
        id: Ray's id of the node.
        host: Its address.
        versions: Versions of areno, Python and torch.
        missing: The requested paths that do not exist there.
        n_cuda: CUDA devices that torch sees among those that Ray has assigned to the run.
    """

    id: str
    host: str
    versions: dict[str, str]
    missing: list[str]
    n_cuda: int = 0


class NodeHost:
    """The worker processes of one node. Ray runs the methods of the three concurrency groups in GROUPS side by side.

    Args:
        environment: Environment variables for the workers. Variables that the node sets itself win.
        folder: Working directory of the driver.
    """

    GROUPS = {"commands": 1, "messages": 1, "watch": 2}  # noqa: RUF012

    def __init__(self, environment: Mapping[str, str], folder: str):
        # Ray sets this one for its own tasks, from the CPUs that the actor has reserved.
        os.environ.pop("OMP_NUM_THREADS", None)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if os.path.isdir(folder):
            os.chdir(folder)
        self._listener: socket.socket | None = None
        self._processes: LocalProcesses | None = None

    def report(self, paths: Iterable[str]) -> NodeReport:
        """Return facts about the node, and which of `paths` do not exist there."""
        import ray
        import torch

        context = ray.get_runtime_context()
        missing = [path for path in paths if not os.path.exists(path)]
        n_cuda = torch.cuda.device_count()
        return NodeReport(context.get_node_id(), ray.util.get_node_ip_address(), versions(), missing, n_cuda)

    def listen(self, host: str) -> int:
        """Open the port at which all ranks meet, on the node of rank 0, and return its number."""
        self._listener = socket.create_server((host, 0))
        return self._listener.getsockname()[1]

    def start(self, spec: EngineSpec, ranks: range, port: int) -> None:
        """Start the workers of these ranks."""
        own = spec.addresses[ranks[0]].host
        if spec.n_nodes > 1 and own != LOOPBACK and (interface := interface_of(own)) is not None:
            # Where several lead out of a node, gloo and NCCL may take one that the other nodes cannot reach.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, interface)
        self._processes = LocalProcesses(spec, ranks, port, self._listener)
        if self._listener is not None:
            self._listener.close()

    def send(self, rank: int, command: bytes) -> None:
        """Send a pickled command to a worker. `receive` reports a worker that has ended."""
        if self._processes is not None:
            with suppress(OSError):
                self._processes.send_bytes(rank, command)

    def receive(self, timeout: float) -> tuple[Arrived, list[int]]:
        """Return arrived messages, ended ranks (see Processes), and the progress counters.

        Only the counters of this node are valid.
        """
        if (processes := self._processes) is None:
            return ([], []), []
        arrived = processes.receive(timeout)
        return arrived, list(processes.counters)

    def exit_codes(self, rank: int | None, timeout: float) -> dict[int, int | None]:
        """Return the exit codes of the workers of this node, after waiting for `rank`, one of them."""
        return {} if self._processes is None else self._processes.exit_codes(rank, timeout)

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        """Return the state in words and the stacks of the workers of this node."""
        return {} if self._processes is None else self._processes.stack_traces()

    def kill(self) -> None:
        """Kill the workers of this node."""
        if self._processes is not None:
            self._processes.kill()

    def close(self) -> None:
        """Let the workers of this node end, and kill those that do not."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes. Builds of torch for other accelerators count as equal."""
    major, minor, _ = platform.python_version_tuple()
    found = {name: _version(name).partition("+")[0] for name in VERSIONS_OF}
    return {"areno": __version__, "python": f"{major}.{minor}", **found}


def _version(package: str) -> str:
    """Return the version of a package, or none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def interface_of(host: str) -> str | None:
    """Return the network interface with this IPv4 address. None if there is none or the system does not say."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None


def leave_sign(folder: str) -> Path:
    """Create an empty file in a folder, for other nodes to look for."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=".seen-", dir=folder)
    os.close(number)
    return Path(name)


def start_actor(ray: Any, options: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Start the actor of a node. `options` choose the node."""
    actor = ray.remote(**options, concurrency_groups=NodeHost.GROUPS, max_restarts=0)(NodeHost)
    return actor.remote(environment, os.getcwd())
