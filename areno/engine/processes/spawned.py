"""A process for each device, as the driver sees them.

A command goes to the leader of every tensor-parallel group, which passes it on to its peers. Requests may be sent while
workers decode; outputs come back as they arise.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any, NoReturn

from areno import heartbeat
from areno.engine.processes import stacks
from areno.engine.processes.child import without_main_module
from areno.engine.processes.messages import Command, Outputs, Reply, WorkerFailure, pack
from areno.engine.processes.pulses import Pulses
from areno.engine.processes.serving import worker_main
from areno.engine.processes.watchdog import Watchdog
from areno.engine.spec import EngineSpec, RolloutStats
from areno.errors import ArenoError, EngineError, WorkerLost
from areno.types import GenerationOutput

_EXIT_GRACE_S = 2.0  # for a process to end by itself
_DEATH_GRACE_S = 2.0  # for a process whose connections are gone to be seen as ended
_FAILURE_GRACE_S = 5.0  # for the other ranks to answer a command that failed on one


class SpawnedGroup:
    """One process for each device. A worker that dies is a WorkerLost in the driver, within seconds."""

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._stack_pipes: list[Any] = []
        self._context = multiprocessing.get_context("spawn")
        self.pulses = Pulses(self._context, spec.world_size, spec.tp_size)
        self.command = ""
        self._lost: WorkerLost | None = None  # all of them, by the watchdog
        self._ready: list[GenerationOutput] = []
        self._stats = [RolloutStats() for _ in range(spec.dp_size)]
        self._last_id = 0  # of the command waited for; 0 is the start
        self._replies: dict[int, Reply] = {}  # to that command, by rank
        self._error: ArenoError | None = None  # of a command that nobody waits for, or of decoding
        self.watchdog = Watchdog(spec.stall_timeout_s, self)
        try:
            self._start()
            self._collect()
            self.pulses.together = False
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        # The ranks meet at a port that the driver opens, so that nobody else can take it; rank 0 listens there.
        with socket.create_server((self._spec.addresses[0].host, 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(self._spec.world_size):
                mine, theirs = self._context.Pipe()
                my_stacks, their_stacks = self._context.Pipe()
                args = (
                    theirs, self._spec, rank, port, listener if rank == 0 else None, self.pulses.counters, their_stacks,
                )  # fmt: skip
                process = self._context.Process(target=worker_main, args=args, name=f"areno-worker-{rank}", daemon=True)
                with without_main_module():
                    process.start()
                theirs.close()
                their_stacks.close()
                self._processes.append(process)
                self._pipes.append(mine)
                self._stack_pipes.append(my_stacks)

    @property
    def _leaders(self) -> range:
        return range(0, self._spec.world_size, self._spec.tp_size)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.call_each(method, [args] * self._spec.dp_size)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        packed = [pack(method, each) for each in args]  # nothing is sent where one of them cannot be
        self._last_id += 1
        self._replies = {}
        self.pulses.together = True
        try:
            for rank, arguments in zip(self._leaders, packed, strict=True):
                self._send(rank, Command(method, arguments, self._last_id))
            return self._collect()
        finally:
            self.pulses.together = False

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        self._send(self._leaders[dp_rank], Command(method, pack(method, args), None))

    def poll(self, timeout: float) -> list[GenerationOutput]:
        if not self._ready:
            self._receive(timeout)
        self._raise_error()
        ready, self._ready = self._ready, []
        return ready

    def stats(self) -> list[RolloutStats]:
        return self._stats

    def look(self) -> dict[int, tuple[str, str]]:
        """See Watched."""
        pids = {rank: process.pid for rank, process in enumerate(self._processes)}
        return stacks.ask(pids, dict(enumerate(self._stack_pipes)), self._spec.world_size > 1)

    def name(self, rank: int) -> str:
        """See Watched."""
        return f"worker {rank} ({self._spec.addresses[rank]})"

    def lose(self, error: WorkerLost) -> None:
        """See Watched."""
        self._lost = error
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        self.watchdog.stop()
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for a command sees the end of its pipe and ends
        deadline = time.monotonic() + _EXIT_GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()  # of no effect on one that has ended
            process.join()
            process.close()
        for pipe in self._stack_pipes:
            pipe.close()
        self._processes, self._pipes, self._stack_pipes = [], [], []

    def _send(self, rank: int, command: Command) -> None:
        if not self._pipes:
            raise EngineError("the engine is closed")
        self.pulses.sent(rank, command.method)
        try:
            self._pipes[rank].send(command)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_death(rank)

    def _collect(self) -> list[Any]:
        """Wait until every rank has answered the last command; the leaders' values.

        A rank that fails alone may leave others waiting for it in a collective, for good: then the group ends here.
        """
        deadline: float | None = None
        while len(self._replies) < len(self._processes):
            self._receive(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if any(reply.error for reply in self._replies.values()):
                deadline = deadline or time.monotonic() + _FAILURE_GRACE_S
                if time.monotonic() > deadline:
                    self.close()
                    break
        self._raise_error()
        return [self._replies[rank].value for rank in self._leaders]

    def _receive(self, timeout: float | None) -> None:
        """Take what has arrived, waiting up to `timeout` seconds for the first. Raises when a worker is gone."""
        if not self._pipes:
            raise EngineError("the engine is closed")
        sentinels = [process.sentinel for process in self._processes]
        ready = set(connection.wait([*self._pipes, *sentinels], timeout))
        gone: list[int] = []
        for rank, (pipe, sentinel) in enumerate(zip(self._pipes, sentinels, strict=True)):
            if pipe in ready:
                try:
                    self._take(rank, pipe.recv())
                except (EOFError, ConnectionResetError):
                    gone.append(rank)
            elif sentinel in ready:
                gone.append(rank)
        if gone:
            self._raise_death(gone[0])

    def _take(self, rank: int, message: Reply | Outputs) -> None:
        heartbeat.beat()
        if isinstance(message, Outputs):
            self._ready.extend(message.outputs)
            self._stats[rank // self._spec.tp_size] = message.stats
        elif message.id is None:
            self._error = self._error or message.error
        elif message.id == self._last_id:  # the rest answers an earlier command that failed on another rank
            self._replies[rank] = message

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _raise_error(self) -> None:
        self._raise_if_lost()
        error, self._error = self._error, None
        for reply in self._replies.values():
            error = error or reply.error
        if error is not None:
            self._replies = {}
            # A rank that lost the connection to a killed one may say so before the end of that one is seen.
            deadline = time.monotonic() + _DEATH_GRACE_S
            while isinstance(error, WorkerFailure) and len(self._processes) > 1 and time.monotonic() < deadline:
                self._raise_if_killed()
                time.sleep(0.02)
            raise error

    def _raise_death(self, rank: int) -> NoReturn:
        self._raise_if_lost()
        self._processes[rank].join(_EXIT_GRACE_S)
        self._raise_if_killed()  # others may end because one was killed
        self._raise_error()  # what a worker sent says more than its end
        code = self._processes[rank].exitcode
        self._raise_end(rank, "stopped answering" if code is None else f"ended with exit code {code}")

    def _raise_if_killed(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                why = ", perhaps by the kernel for lack of memory" if name == "SIGKILL" else ""
                self._raise_end(rank, f"was killed by {name}{why}")

    def _raise_end(self, rank: int, how: str) -> NoReturn:
        raise WorkerLost(f"{self.name(rank)} {how}")
