"""The supervisor process, which starts one process of user code and ends everything that the user code starts.

The driver starts a supervisor, which forks the process that runs reward functions or agents. User code may start
processes that leave the process group and outlive their parent. On Linux such a process becomes a child of the
supervisor (PR_SET_CHILD_SUBREAPER), which kills it at the end. On other systems only the process group of the user code
is killed.
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

from areno.user_processes.process import serve_driver

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_END_LIMIT_S = 5.0  # a process of another user, or one that waits for a dead disk, cannot be killed
_POLL_S = 0.5  # between two checks that the driver is alive
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}
_SIGNALLED = 128  # the exit code of a process that was killed by signal n is 128 + n, as in a shell


def main(fd: int, driver_pid: int, module: str) -> None:
    """Run `serve` of a module in a process until it ends, SIGTERM arrives or the driver ends. Then kill all children.

    `fd` is the process's socket to the driver. The exit code is that of the process, or 128 + n if signal n killed it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    # Block the signals, and wait for them with sigtimedwait. A handler could run just before a call that then blocks.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        _become_worker(fd, module)
    os.close(fd)
    code = None
    while code is None and os.getppid() == driver_pid and not _wait_for_stop():
        code = _reap_children(worker)
    _kill_all(worker)
    code = code or 0
    os._exit(code if code >= 0 else _SIGNALLED - code)


def exit_text(code: int) -> str:
    """Describe how a process ended, such as "exit code 3". `code` is the supervisor's exit code, -n after signal n."""
    number = -code if code < 0 else code - _SIGNALLED
    if number in set(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"exit code {code}"


def _become_worker(fd: int, module: str) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        serve_driver(fd, import_module(module).serve)
    finally:
        os._exit(1)


def _wait_for_stop() -> bool:
    """Wait at most _POLL_S seconds until a child ends or SIGTERM arrives. Return whether SIGTERM arrived."""
    if sys.platform == "linux":
        found = signal.sigtimedwait(_AWAITED, _POLL_S)
        return found is not None and found.si_signo == signal.SIGTERM
    time.sleep(_POLL_S / 10)
    return signal.SIGTERM in signal.sigpending()


def _reap_children(worker: int) -> int | None:
    """Collect the exit codes of ended children. Return that of `worker` (-n after signal n), or None while it runs."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _kill_all(worker: int) -> None:
    """Kill the process group of `worker`, then all children (on Linux descendants), in at most _END_LIMIT_S seconds."""
    if worker:
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    give_up = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < give_up:
        for pid in _child_pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _child_pids() -> list[int]:
    """Read the process ids of this process's children from /proc, if it exists."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
