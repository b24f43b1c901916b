"""Stack traces of a running process: Python stacks of its threads, and the last collective recorded by torch."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIGNAL = signal.SIGUSR2
_ANSWER_S = 2.0  # for all workers to begin their answer
_QUIET_S = 0.3  # silence after which an answer is complete
_FRAMES = 30  # number of innermost frames shown for a thread of the driver
_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a device",
}
# Functions in which side threads of a worker wait for the driver.
_WAITING = (
    ("worker_main.py", " in _read_commands"),
    ("stack_traces.py", " in _send_collectives"),
    ("child.py", " in watch"),
)
# Code in which a worker waits for other ranks: collectives in torch, their completion, and commands from its leader.
_WAITS_FOR_OTHER_RANKS = ("distributed_c10d", " in wait_for", "process_groups.py")
# A process in one of these states does not run the handler of a signal.
_CANNOT_ANSWER = {"T", "t"}


class StackTraceServer:
    """Sends a worker's stack traces to the driver on request, even while its main thread hangs in C code.

    The driver requests stack traces by a signal (SIGUSR2), upon which faulthandler writes the stacks to the pipe.
    """

    def __init__(self, pipe: Any, with_collectives: bool):
        self._pipe = pipe
        faulthandler.register(_SIGNAL, file=pipe.fileno(), all_threads=True)
        if with_collectives:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # number of collectives that torch records
            threading.Thread(target=self._send_collectives, daemon=True, name="areno-collectives").start()

    def _send_collectives(self) -> None:
        """When the driver writes a byte, send it the collectives that torch has recorded. Runs in a thread."""
        with contextlib.suppress(OSError):
            while os.read(self._pipe.fileno(), 1):
                os.write(self._pipe.fileno(), _recorded_collectives().encode())


def _recorded_collectives() -> str:
    torch = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return ""
    return format_collectives(pickle.loads(dump(includeStackTraces=False)))


def format_collectives(trace: Mapping[str, Any]) -> str:
    """Format the last three unfinished collectives in a dump of torch's flight recorder, or the last completed one."""
    entries = trace.get("entries", [])
    in_progress = [entry for entry in entries if entry["state"] != "completed" and not entry.get("retired")]
    title = "Collective under way" if in_progress else "Last collective, completed"
    return "".join(
        f"{title}: {entry['profiling_name']} number {entry['collective_seq_id']} of process group "
        f"{entry['process_group'][0]} ({entry['process_group'][1]}), sizes {entry['input_sizes']}\n"
        for entry in (in_progress or entries[-1:])[-3:]
    )


def process_state(pid: int) -> str:
    """Return the state letter of a process in /proc/PID/stat, such as "R" or "S". Empty for no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def request_stacks(
    pids: Mapping[int, int], pipes: Mapping[int, Any], with_collectives: bool
) -> dict[int, tuple[str, str]]:
    """Return (process state in words, Python stacks) by rank of workers on this machine. A normal state is ""."""
    states = {rank: process_state(pid) for rank, pid in pids.items()}
    awake = [rank for rank, state in states.items() if state not in _CANNOT_ANSWER]
    for rank in awake:
        with contextlib.suppress(OSError):
            os.kill(pids[rank], _SIGNAL)
    deadline = time.monotonic() + _ANSWER_S
    shown = {rank: _format_dump(_read_until(pipes[rank], deadline)) for rank in awake}
    if with_collectives:
        for rank in awake:
            with contextlib.suppress(OSError):
                os.write(pipes[rank].fileno(), b"?")
        deadline = time.monotonic() + _ANSWER_S
        shown = {rank: f"{stacks}\n{_read_until(pipes[rank], deadline)}".rstrip() for rank, stacks in shown.items()}
    deaf = "(a stopped process shows no stack)"
    return {rank: (_STATES.get(state, ""), shown.get(rank, deaf)) for rank, state in states.items()}


def _read_until(pipe: Any, deadline: float) -> str:
    """Read text until the deadline, or until 0.3 seconds pass without new bytes after the first bytes."""
    chunks: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], min(left, _QUIET_S) if chunks else left)[0]:
            break
        if not (chunk := os.read(pipe.fileno(), 1 << 16)):
            break
        chunks.append(chunk)
    return b"".join(chunks).decode(errors="replace").rstrip()


def _format_dump(dump: str) -> str:
    """Format a stack dump of faulthandler without the threads that only wait for the driver."""
    sections = []
    for section in dump.split("\n\n"):
        title, _, frames = section.partition("\n")
        if not any(file in line and function in line for file, function in _WAITING for line in frames.split("\n")):
            sections.append(
                f"{'Main' if title.startswith('Current') else 'Another'} thread, last call first:\n{frames}"
            )
    return "\n".join(sections if dump else ["(it shows no stack)"])


def waits_for_other_ranks(stacks: str) -> bool:
    _, _, main = stacks.partition("Main thread")
    return any(place in line for line in main.split("\n")[1:6] for place in _WAITS_FOR_OTHER_RANKS)


def driver_stack_traces(hidden: int) -> str:
    """Return the stacks of this process's threads except the thread `hidden`, with the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame, _FRAMES)).rstrip()
        for ident, frame in frames
        if ident != hidden
    )
