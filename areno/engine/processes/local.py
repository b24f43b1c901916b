"""Worker processes on this machine: their start and end, and their pipes and progress counters."""

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
    """The interface to a set of worker processes, on this machine (LocalProcesses) or on several (RayProcesses).

    `rank` is always the global rank in the run. `send`, `receive` and `exit_codes` raise WorkerLost if a machine was
    lost.

    Attributes:
        spec: Description of the workers, including the host of each rank.
        counters: Progress counters of all ranks, FIELDS integers per rank, for WorkerHeartbeats.
        death_grace_s: Longest time, in seconds, from the end of a process until `exit_codes` returns its code.
    """

    spec: EngineSpec
    counters: Any
    death_grace_s: float

    def send(self, rank: int, command: Command) -> None:
        """Send a command to one worker without waiting for the reply.

        Args:
            rank: Global rank of the worker.
            command: The method to call and its pickled arguments.

        Raises:
            BrokenPipeError, ConnectionResetError: The worker has ended.
        """
        ...

    def receive(self, timeout: float | None) -> Arrived:
        """Return the messages that have arrived, and the ranks whose connection has ended since the last call.

        Args:
            timeout: Longest wait for the first message, in seconds. None waits without limit.

        Returns:
            `(messages, ended)`: a list of (rank, pickled message) pairs, and a list of ranks. Both are empty after a
            timeout.
        """
        ...

    def exit_codes(self, rank: int | None = None, timeout: float = 0.0) -> dict[int, int | None]:
        """Return the exit code of each worker by rank.

        Args:
            rank: Rank whose end to wait for before the codes are read. None does not wait.
            timeout: Longest wait for the end of `rank`, in seconds.

        Returns:
            Exit code by rank. The code is None while the worker runs, and -N if signal N ended it.
        """
        ...

    def suspect_loss(self) -> None:
        """Notice lost machines sooner from now on.

        Call this after a worker has failed, since a lost machine may be the cause.
        """
        ...

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        """Return a pair of texts for each worker by rank: its process state in words, and its Python stacks.

        The process state is an empty text for a process that runs or sleeps normally.
        """
        ...

    def kill(self) -> None:
        """Kill all workers at once, without waiting for them to close."""
        ...

    def close(self) -> None:
        """Let all workers end by themselves, and kill those that are still running after a few seconds."""
        ...


class LocalProcesses:
    """Worker processes on this machine. Implements Processes.

    Args:
        spec: Description of all workers of the run, on all machines.
        ranks: The global ranks that run on this machine.
        port: TCP port of the rendezvous (the TCPStore of torch.distributed), on the host of rank 0.
        listener: Open socket that listens at `port`, for rank 0. None if rank 0 runs on another machine.
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
        """Send a command to one worker without waiting for the reply."""
        self._pipes[rank].send(command)

    def send_bytes(self, rank: int, command: bytes) -> None:
        """Send an already pickled Command to one worker without waiting for the reply."""
        self._pipes[rank].send_bytes(command)

    def receive(self, timeout: float | None) -> Arrived:
        """Return the messages that have arrived, and the ranks whose connection has ended since the last call.

        Args:
            timeout: Longest wait for the first message, in seconds. None waits without limit.

        Returns:
            `(messages, ended)`: a list of (rank, pickled message) pairs, and a list of ranks. Both are empty after a
            timeout.
        """
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
        """Return the exit code of each worker by rank, None for a worker that is still running.

        Args:
            rank: Rank whose end to wait for before the codes are read. None does not wait.
            timeout: Longest wait for the end of `rank`, in seconds.
        """
        if rank is not None:
            self.processes[rank].join(timeout)
        return {each: process.exitcode for each, process in self.processes.items()}

    def suspect_loss(self) -> None:
        """Do nothing, since the end of a process on this machine is always noticed at once."""

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        """Return a pair of texts for each worker by rank: its process state in words, and its Python stacks.

        The process state is an empty text for a process that runs or sleeps normally.
        """
        pids = {rank: process.pid for rank, process in self.processes.items()}
        return stack_traces.request(pids, self._stack_trace_pipes, self.spec.world_size > 1)

    def kill(self) -> None:
        """Kill all workers."""
        for process in self.processes.values():
            process.kill()

    def close(self) -> None:
        """Close the pipes, wait up to two seconds for the workers to end, and kill those that are still running."""
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


def on_this_machine(spec: EngineSpec) -> LocalProcesses:
    """Start all workers described by a spec as processes on this machine.

    Args:
        spec: Description of the workers.

    Returns:
        The started processes. Their models may still be loading.
    """
    # The driver opens the rendezvous port, so that no other program can take it, and rank 0 listens at it.
    with socket.create_server((spec.addresses[0].host, 0)) as listener:
        return LocalProcesses(spec, range(spec.world_size), listener.getsockname()[1], listener)
