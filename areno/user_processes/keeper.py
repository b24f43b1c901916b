"""Stands between the driver and one process of users' code, and ends whatever that code started.

The driver starts a keeper, and the keeper forks the process, which runs a reward function (areno.rewards.process) or an
agent. A process that these start may leave its session and lose its parent. On Linux it then becomes a child of the
keeper (PR_SET_CHILD_SUBREAPER), which ends it. On other systems only the process group of the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from areno.user_processes.process import run

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_END_LIMIT_S = 5.0  # a process of another user, or one that waits for a dead disk, cannot be ended
_LOOK_S = 0.5  # whether the driver is still there
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}
_SIGNALLED = 128  # exit code of a process that signal n ended: 128 + n, as in a shell


def main(fd: int, driver_pid: int, serves: str) -> None:
    """Run a process until it ends, SIGTERM comes or the driver is gone; then end all processes below this one.

    fd: the socket to the driver. serves: the module whose `serve` the process runs. Exits with its code; see
    `exit_text`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    # Blocked and waited for: a handler could run just before a blocking call, which would then not return.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        _become_worker(fd, serves)
    os.close(fd)
    code = None
    while code is None and os.getppid() == driver_pid and not _was_stopped():
        code = _reap(worker)
    _end_all(worker)
    code = code or 0
    os._exit(code if code >= 0 else _SIGNALLED - code)


def exit_text(code: int) -> str:
    """The end of a process in words, from the exit code of its keeper: `exit code 3`, `signal SIGKILL`."""
    number = -code if code < 0 else code - _SIGNALLED
    if number in set(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"exit code {code}"


def _become_worker(fd: int, serves: str) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        run(fd, import_module(serves).serve)
    finally:
        os._exit(1)


def _was_stopped() -> bool:
    """Wait until a child has ended, SIGTERM comes or a moment has passed; whether it was SIGTERM."""
    if sys.platform == "linux":
        found = signal.sigtimedwait(_AWAITED, _LOOK_S)
        return found is not None and found.si_signo == signal.SIGTERM
    time.sleep(_LOOK_S / 10)
    return signal.SIGTERM in signal.sigpending()


def _reap(worker: int) -> int | None:
    """Collect children that have ended; the exit code of the process if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _end_all(worker: int) -> None:
    """Kill the children of this process until none is left: those of a killed one become its own."""
    if worker:
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    give_up = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < give_up:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
