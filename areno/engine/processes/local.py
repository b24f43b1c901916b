"""Starts and ends worker processes on this machine, and reads their pipes and progress counters."""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import time
from multiprocessing import connection
from typing import Any

from areno.engine.processes import stack_traces
from areno.engine.processes.child import without_main_module
from areno.engine.processes.messages import Command
from areno.engine.processes.watchdog import FIELDS
from areno.engine.processes.worker_main import worker_main
from areno.specs.engine import EngineSpec

_EXIT_GRACE_S = 2.0  # for a process to end by itself

Arrived = tuple[list[tuple[int, bytes]], list[int]]
"""(rank that sent it, pickled message) pairs, and the ranks whose connections have newly ended."""


class LocalProcesses:
    """The worker processes of some ranks, all on this machine. RayProcesses has the same methods for several machines.

    `rank` is always the global rank in the run. `counters` holds FIELDS integers per rank, for WorkerHeartbeats. An
    exit code is known `death_grace_s` after a process has ended, at the latest. `port` is the rendezvous port on the
    host of rank 0. `listener` listens at this port if rank 0 runs here. In RayProcesses, `send`, `receive` and
    `exit_codes` raise WorkerLost if a machine was lost.
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
        """Send a command without waiting. Raises BrokenPipeError or ConnectionResetError if the worker has ended."""
        self._pipes[rank].send(command)

    def send_bytes(self, rank: int, command: bytes) -> None:
        self._pipes[rank].send_bytes(command)

    def receive(self, timeout: float | None) -> Arrived:
        """Return messages that arrive within `timeout`, and ranks whose connection has ended since the last call."""
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
        """Return exit codes by rank, None for a running worker. First waits up to `timeout` for `rank` to end."""
        if rank is not None:
            self.processes[rank].join(timeout)
        return {each: process.exitcode for each, process in self.processes.items()}

    def expect_lost_node(self) -> None:
        """Notice lost machines sooner from now on. Call this after a worker has failed. No effect on one machine."""

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        """Return (process state, Python stacks) of each rank. The state is empty for a normal process."""
        pids = {rank: process.pid for rank, process in self.processes.items()}
        return stack_traces.request_stacks(pids, self._stack_trace_pipes, self.spec.world_size > 1)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def close(self) -> None:
        """Let all workers end by themselves, and kill those that are still running after a few seconds."""
        for pipe in self._pipes.values():
            pipe.close()  # a worker that waits for a command sees the end of its pipe and ends
        deadline = time.monotonic() + _EXIT_GRACE_S
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes.values():
            process.kill()  # has no effect on a process that has ended
            process.join()
            process.close()
        for pipe in self._stack_trace_pipes.values():
            pipe.close()
        self.processes, self._pipes, self._stack_trace_pipes = {}, {}, {}


def start_local_processes(spec: EngineSpec) -> LocalProcesses:
    # The driver opens the rendezvous port, so that no other program can take it, and rank 0 listens at it.
    with socket.create_server((spec.addresses[0].host, 0)) as listener:
        return LocalProcesses(spec, range(spec.world_size), listener.getsockname()[1], listener)
