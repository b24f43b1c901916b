"""Worker processes of this machine: their pipes, the progress counters they share with the driver, and their end."""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import time
from multiprocessing import connection
from typing import Any, Protocol

from areno.engine.processes import stack_traces
from areno.engine.processes.child import without_main_module
from areno.engine.processes.messages import Command
from areno.engine.processes.serving import worker_main
from areno.engine.processes.watchdog import FIELDS
from areno.engine.spec import EngineSpec

_EXIT_GRACE_S = 2.0  # for a process to end by itself

Arrived = tuple[list[tuple[int, bytes]], list[int]]
"""Pickled messages with the ranks that sent them, and the ranks whose connections have ended since."""


class Processes(Protocol):
    """The interface of a set of worker processes, on this machine (LocalProcesses) or on several (RayProcesses).

    Ranks are those of the whole run. All methods but `kill` and `close` raise WorkerLost if a machine was lost.

    Attributes:
        spec: Description of the workers, including their hosts.
        counters: Progress counters of all ranks, see WorkerHeartbeats.
        death_grace_s: Seconds until the end of a process is noticed at the latest.
    """

    spec: EngineSpec
    counters: Any
    death_grace_s: float

    def send(self, rank: int, command: Command) -> None:
        """Send a command to a worker.

        Raises:
            BrokenPipeError, ConnectionResetError: The worker has ended.
        """
        ...

    def receive(self, timeout: float | None) -> Arrived:
        """Return the messages that have arrived, and the ranks whose connection has newly ended.

        Args:
            timeout: Longest wait for the first message, in seconds. None waits without limit.
        """
        ...

    def exit_codes(self, rank: int | None = None, timeout: float = 0.0) -> dict[int, int | None]:
        """Return the exit code of each worker, None while it runs.

        Args:
            rank: Wait for the end of this rank first.
            timeout: Longest wait, in seconds.
        """
        ...

    def suspect_loss(self) -> None:
        """Report that a worker has failed, perhaps because another is gone. From now on losses are noticed sooner."""
        ...

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        """Return the state in words and the Python stacks of each worker."""
        ...

    def kill(self) -> None:
        """Kill all workers."""
        ...

    def close(self) -> None:
        """Let all workers end, and kill those that do not."""
        ...


class LocalProcesses:
    """Worker processes of this machine. Implements Processes.

    Args:
        spec: Description of all workers of the run.
        ranks: The ranks that run on this machine.
        port: Port at which all ranks meet, see join_groups.
        listener: Socket that listens at the port, for rank 0.
    """

    death_grace_s = 2.0

    def __init__(self, spec: EngineSpec, ranks: range, port: int, listener: socket.socket | None):
        self.spec, self.ranks = spec, ranks
        context = multiprocessing.get_context("spawn")
        self.counters = context.RawArray(ctypes.c_uint64, FIELDS * spec.world_size)
        self.processes: dict[int, Any] = {}
        self._pipes: dict[int, Any] = {}
        self._stack_trace_pipes: dict[int, Any] = {}
        self._gone: set[int] = set()
        try:
            for rank in ranks:
                mine, theirs = context.Pipe()
                my_stack_traces, their_stack_traces = context.Pipe()
                args = (theirs, spec, rank, port, listener if rank == 0 else None, self.counters, their_stack_traces)
                process = context.Process(target=worker_main, args=args, name=f"areno-worker-{rank}", daemon=True)
                with without_main_module():
                    process.start()
                theirs.close()
                their_stack_traces.close()
                self.processes[rank], self._pipes[rank], self._stack_trace_pipes[rank] = process, mine, my_stack_traces
        except BaseException:
            self.close()
            raise

    def send(self, rank: int, command: Command) -> None:
        """Send a command to a worker."""
        self._pipes[rank].send(command)

    def send_bytes(self, rank: int, command: bytes) -> None:
        """Send a pickled command to a worker."""
        self._pipes[rank].send_bytes(command)

    def receive(self, timeout: float | None) -> Arrived:
        """Return the messages that have arrived, and the ranks whose connection has newly ended."""
        open_ones = [rank for rank in self._pipes if rank not in self._gone]
        sentinels = {rank: self.processes[rank].sentinel for rank in open_ones}
        ready = set(connection.wait([*(self._pipes[rank] for rank in open_ones), *sentinels.values()], timeout))
        messages, gone = [], []
        for rank in open_ones:
            if self._pipes[rank] in ready:
                try:
                    messages.append((rank, self._pipes[rank].recv_bytes()))
                except (EOFError, ConnectionResetError):
                    gone.append(rank)
            elif sentinels[rank] in ready:
                gone.append(rank)
        self._gone.update(gone)
        return messages, gone

    def exit_codes(self, rank: int | None = None, timeout: float = 0.0) -> dict[int, int | None]:
        """Return the exit code of each worker, None while it runs, after waiting for the end of `rank`."""
        if rank is not None:
            self.processes[rank].join(timeout)
        return {each: process.exitcode for each, process in self.processes.items()}

    def suspect_loss(self) -> None:
        """Do nothing: the end of a process of this machine is always noticed."""

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        """Return the state in words and the Python stacks of each worker."""
        pids = {rank: process.pid for rank, process in self.processes.items()}
        return stack_traces.request(pids, self._stack_trace_pipes, self.spec.world_size > 1)

    def kill(self) -> None:
        """Kill all workers."""
        for process in self.processes.values():
            process.kill()

    def close(self) -> None:
        """Close the pipes, give the workers a moment to end, and kill those that do not."""
        for pipe in self._pipes.values():
            pipe.close()  # a worker that waits for a command sees the end of its pipe and ends
        deadline = time.monotonic() + _EXIT_GRACE_S
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes.values():
            process.kill()  # of no effect on one that has ended
            process.join()
            process.close()
        for pipe in self._stack_trace_pipes.values():
            pipe.close()
        self.processes, self._pipes, self._stack_trace_pipes = {}, {}, {}


def on_this_machine(spec: EngineSpec) -> LocalProcesses:
    """Start all workers of a spec on this machine."""
    # The ranks meet at a port that the driver opens, so that nobody else can take it; rank 0 listens there.
    with socket.create_server((spec.addresses[0].host, 0)) as listener:
        return LocalProcesses(spec, range(spec.world_size), listener.getsockname()[1], listener)
