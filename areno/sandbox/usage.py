"""The processes of a command, and the memory that they take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence


def processes_here() -> list[int]:
    """Return the processes in this PID namespace but its init, as the mounted /proc shows them."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def descendants(proc: int) -> list[int]:
    """Return the descendants of this process, where `proc` is the open folder /proc."""
    found: list[int] = []
    left = [int(os.readlink("self", dir_fd=proc))]
    while left:
        with contextlib.suppress(OSError):
            process = left.pop()
            for thread in _list(proc, f"{process}/task"):
                children = [int(each) for each in _read(proc, f"{process}/task/{thread}/children").split()]
                found += children
                left += children
    return found


def measure(proc: int, processes: Sequence[int], *, exact: bool = False) -> tuple[int, int]:
    """Return the number of threads of processes, and the bytes of their memory. Files that are mapped do not count.

    Memory that processes share counts for each, unless the measurement is `exact`, which takes long.
    """
    threads = memory = 0
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            status = _read(proc, f"{process}/status")
            threads += _number(status, b"\nThreads:")
            if exact:
                rollup = _read(proc, f"{process}/smaps_rollup")
                memory += _number(rollup, b"\nPss:") - _number(rollup, b"\nPss_File:") + _number(rollup, b"\nSwapPss:")
            else:
                memory += sum(_number(status, name) for name in (b"\nRssAnon:", b"\nRssShmem:", b"\nVmSwap:"))
    return threads, memory << 10


def _number(text: bytes, name: bytes) -> int:
    rest = text.partition(name)[2]
    return int(rest[:24].split(None, 1)[0]) if rest else 0


def _list(proc: int, path: str) -> list[str]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _read(proc: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
