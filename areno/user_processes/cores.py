"""How many reward processes a machine has cores for."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
FEWEST, MOST = 2, 64
"""One process that hangs does not hold up all others; each takes memory, and time to start."""


def default_workers(n_devices: int = 0, cgroup: Path = _CGROUP) -> int:
    """The cores of this process, less one for the driver and one for each device's worker."""
    return min(MOST, max(FEWEST, usable_cores(cgroup) - 1 - n_devices))


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may use: those it is bound to, and no more than its container's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """Cores' worth of time that a container gives its processes; infinite without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return math.inf
