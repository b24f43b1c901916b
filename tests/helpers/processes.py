"""Processes that tests start and count. None outlives its test, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areno.engine.engine import Engine
from tests.helpers import warm
from tests.helpers.waiting import until

reads_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


@contextlib.contextmanager
def started(command: list[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A process as the leader of a group of its own. Whatever is left of the group dies at the end."""
    process: subprocess.Popen[str] = subprocess.Popen(command, text=True, start_new_session=True, **settings)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def children(pid: int | None = None) -> list[int]:
    """All processes that a process has started, and theirs; those that have ended do not count."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(stat.parent.name))
    found, frontier = [], [os.getpid() if pid is None else pid]
    while frontier:
        frontier = [child for process in frontier for child in parents.get(process, [])]
        found += frontier
    return [process for process in found if process != warm.server_pid()]


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_ended(pids: Iterable[int], seconds: float = 60.0) -> None:
    """Wait for processes that end by themselves. Fails with those that do not."""
    left = list(pids)

    def look() -> bool:
        left[:] = filter(is_running, left)
        return not left

    until(look, seconds, pause_s=0.05, found=lambda: f"{left} go on")


def worker_pids(engine: Engine) -> list[int]:
    """The process ids of an engine's workers, by rank."""
    return [process.pid for process in engine.workers.processes.processes.values()]  # type: ignore[attr-defined]


def worker_of(engine: Engine) -> Any:
    """The worker of an engine that works in this process."""
    return engine.workers.worker  # type: ignore[attr-defined]
