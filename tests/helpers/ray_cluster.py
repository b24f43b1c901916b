"""A Ray cluster of several nodes on this machine, reachable from nowhere else."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areno.engine.processes.ray_cluster import QUIET
from tests.helpers.processes import children, until_ended
from tests.helpers.waiting import until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`")

# So that Ray stays on the loopback device, and sees in seconds that a node is gone.
ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **QUIET}
_SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
_NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}


class TwoNodes:
    """A cluster whose second node comes and goes. The first one holds this process."""

    def __init__(self) -> None:
        from ray._common.utils import reset_ray_address
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True, head_node_args={**_NODE, "include_dashboard": False, "_system_config": _SYSTEM}
        )
        reset_ray_address()  # who does not know of this cluster does not find it
        self._second: Any = None

    def complete(self) -> None:
        """Let the second node come."""
        if self._second is None:
            self._second = self.cluster.add_node(**_NODE)

    def lose_node(self) -> None:
        """Kill all that Ray runs on the second node. Actors end some time after their raylet: wait for them."""
        [raylet] = self._second.all_processes["raylet"]
        actors = children(raylet.process.pid)
        self.cluster.remove_node(self._second, allow_graceful=False)
        self._second = None
        until_ended(actors)

    def workers(self) -> list[int]:
        """Processes of actors of ours and of their workers."""
        return [pid for pid in children() if _runs(pid, b"spawn_main", b"ray::NodeHost")]

    def wait_without_workers(self, within_s: float = 20.0) -> None:
        """Return when the last of them has ended. Ray says that it has killed one before it is gone."""
        until(lambda: not self.workers(), within_s, pause_s=0.1, found=self.workers)


def _runs(pid: int, *words: bytes) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(word in line for word in words)


@contextlib.contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """The cluster that RAY_ADDRESS names meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():  # before Ray is imported
            patch.setenv(name, value)
        from ray._private import ray_constants

        # If another test has imported Ray before, it has read the environment of that time.
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        cluster = TwoNodes()
        try:
            patch.setenv("RAY_ADDRESS", cluster.cluster.address)
            yield cluster
        finally:
            import ray

            ray.shutdown()
            cluster.cluster.shutdown()
