"""The driver's view of a group of worker processes, one per device, on this machine or on several.

The driver sends a command to the leader (rank 0) of every tensor-parallel group, and the leader broadcasts it to the
other ranks. Requests may be sent while workers decode. `poll` returns their samples.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from areno import heartbeat, trace
from areno.engine.processes.local import LocalProcesses, start_local_processes
from areno.engine.processes.messages import Command, Reply, WorkerFailure, WorkerOutputs, pack_command
from areno.engine.processes.watchdog import Watchdog, WorkerHeartbeats
from areno.engine.reports import RolloutStats
from areno.errors import ArenoError, CheckpointError, EngineError, WorkerLost
from areno.specs.engine import EngineSpec
from areno.types import GenerationOutput

if TYPE_CHECKING:
    from areno.engine.processes.ray_workers import RayProcesses

    Processes = LocalProcesses | RayProcesses

_DEATH_WAIT_S = 2.0  # longest wait for the exit code of a process whose connection has ended
_FAILURE_GRACE_S = 5.0  # for the other ranks to answer a command that failed on one rank


class SpawnedGroup:
    """A group of worker processes, one per device. If a worker ends, calls raise WorkerLost within seconds.

    `spec` describes the workers that were started: a Ray cluster may have started fewer ranks.
    """

    def __init__(self, spec: EngineSpec, start: Callable[[EngineSpec], Processes] = start_local_processes):
        self.command = ""
        self._lost: WorkerLost | None = None  # set when the watchdog has killed all workers
        self._gone: list[int] = []  # ranks whose connection has ended
        self._ready: list[GenerationOutput] = []
        self._last_id = 0  # id of the command whose replies are awaited; 0 is the start
        self._replies: dict[int, Reply] = {}  # replies to that command, by rank
        self._host_bytes: dict[int, int] = {}  # by rank, as of its last reply
        self._error: ArenoError | None = None  # from a command without a reply, or from decoding
        self.processes: Processes | None = start(spec)
        self.spec = self.processes.spec
        self._layout = self.spec.layout
        self._stats = [RolloutStats() for _ in self._layout.leaders]
        # One for each rank: agents' requests are sent by another thread than the commands of training.
        self._sending = [threading.Lock() for _ in range(self.spec.world_size)]
        self.heartbeats = WorkerHeartbeats(self.processes.counters, self._layout)
        self.watchdog = Watchdog(spec.engine.stall_timeout_s, self)
        try:
            self._collect_replies()
            self.heartbeats.together = False
        except BaseException:
            self.close()
            raise

    @property
    def _live_processes(self) -> Processes:
        if self.processes is None:
            raise EngineError("the engine is closed")
        return self.processes

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker, and return the result of each data-parallel rank.

        Raises EngineError if an argument cannot be pickled or the engine is closed, WorkerLost if a worker has ended,
        and the worker's ArenoError if the method failed.
        """
        return self.call_each(method, [args] * self._layout.dp_size)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method as `call` does, with separate arguments for each data-parallel rank."""
        packed = [
            pack_command(method, each) for each in args
        ]  # before sending: if one cannot be pickled, nothing is sent
        self._last_id += 1
        self._replies = {}
        self.heartbeats.together = True
        try:
            for rank, arguments in zip(self._layout.leaders, packed, strict=True):
                self._send_command(rank, Command(method, arguments, self._last_id))
            return self._collect_replies()
        finally:
            self.heartbeats.together = False

    def call_nowait(self, dp_rank: int, method: str, *args: Any) -> None:
        """Send a command without waiting, from any thread. If it fails, a later `poll` or `call` raises the error."""
        self._send_command(self._layout.leaders[dp_rank], Command(method, pack_command(method, args), None))

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Return the outputs that have arrived since the last call, after at most `timeout` seconds.

        Raises WorkerLost if a worker has ended, and the worker's ArenoError if decoding or a `call_nowait` failed.
        """
        if not self._ready:
            self._receive(timeout)
        self._raise_error()
        ready, self._ready = self._ready, []
        return ready

    def stats(self) -> list[RolloutStats]:
        return self._stats

    def host_bytes(self) -> int:
        """Return the host memory that all workers have in use, as of their last replies."""
        return sum(self._host_bytes.values())

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        return {} if self.processes is None else self.processes.stack_traces()

    def worker_name(self, rank: int) -> str:
        return f"worker {rank} ({self.spec.addresses[rank]})"

    def mark_lost(self, error: WorkerLost) -> None:
        """Kill all workers, and raise `error` in pending and later calls of this group."""
        self._lost = error
        if self.processes is not None:
            self.processes.kill()

    def close(self) -> None:
        """End the worker processes, which frees their devices. Closing twice has no effect."""
        self.watchdog.stop()
        processes, self.processes = self.processes, None
        if processes is not None:
            processes.close()

    def _send_command(self, rank: int, command: Command) -> None:
        processes = self._live_processes
        try:
            with self._sending[rank]:
                self.heartbeats.record_command(rank, command.method)
                processes.send(rank, command)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_death(rank)

    def _collect_replies(self) -> list[Any]:
        """Wait until every rank has replied to the last command, and return the values of the leaders.

        If a rank fails, other ranks may wait for it forever in a collective. So the whole group is closed if replies
        are still missing some seconds after the first error.
        """
        deadline: float | None = None
        while len(self._replies) < self.spec.world_size:
            self._receive(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if any(reply.error for reply in self._replies.values()):
                self._live_processes.expect_lost_node()
                deadline = deadline or time.monotonic() + _FAILURE_GRACE_S
                if time.monotonic() > deadline:
                    self.close()
                    break
        self._raise_error()
        return [self._replies[rank].value for rank in self._layout.leaders]

    def _receive(self, timeout: float | None) -> None:
        """Handle the messages that arrive within `timeout` seconds. Raises WorkerLost if a worker has ended."""
        processes = self._live_processes
        if not self._gone:
            messages, self._gone = processes.receive(timeout)
            for rank, message in messages:
                self._store_message(rank, pickle.loads(message))
        if self._gone:
            self._raise_death(self._gone[0])

    def _store_message(self, rank: int, message: Reply | WorkerOutputs) -> None:
        heartbeat.beat()
        if isinstance(message, Reply):
            trace.extend(message.events)
            self._host_bytes[rank] = message.host_bytes
            if message.error is not None:
                message.error = self._with_host(rank, message.error)
        if isinstance(message, WorkerOutputs):
            self._ready.extend(message.outputs)
            self._stats[self._layout.replica_and_shard(rank)[0]] = message.stats
        elif message.id is None:
            self._error = self._error or message.error
        elif message.id == self._last_id:  # other replies are to an earlier command that failed on another rank
            self._replies[rank] = message

    def _with_host(self, rank: int, error: ArenoError) -> ArenoError:
        """Add the host of `rank` to a CheckpointError, in a run on several nodes."""
        if self.spec.n_nodes == 1 or not isinstance(error, CheckpointError):
            return error
        host = self.spec.addresses[rank].host
        return CheckpointError([problem.on_node(host) for problem in error.problems])

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _raise_error(self) -> None:
        """Raise the first error sent by a worker, if any.

        If areno did not raise this error itself (an error of NCCL, for example), it may be a consequence of another
        worker's death. WorkerLost is raised in place of such an error if a signal has killed a worker.
        """
        self._raise_if_lost()
        error, self._error = self._error, None
        for reply in self._replies.values():
            error = error or reply.error
        if error is not None:
            self._replies = {}
            # A rank that lost its connection to a killed rank may report it before that exit is noticed.
            if isinstance(error, WorkerFailure) and self.spec.world_size > 1 and self.processes is not None:
                deadline = time.monotonic() + self.processes.death_grace_s
                while time.monotonic() < deadline:
                    self._raise_if_killed()
                    time.sleep(0.02)
            raise error

    def _raise_death(self, rank: int) -> NoReturn:
        """Raise the most specific error that explains why the worker process of `rank` has ended.

        This is WorkerLost if a signal has killed any worker. Otherwise it is an error that a worker has sent, or else a
        WorkerLost with the exit code.
        """
        self._raise_if_lost()
        code = self._live_processes.exit_codes(rank, _DEATH_WAIT_S)[rank]
        self._raise_if_killed()  # other workers may end because one was killed
        self._raise_error()  # an error sent by the worker says more than its exit code
        self._raise_worker_lost(rank, "stopped answering" if code is None else f"ended with exit code {code}")

    def _raise_if_killed(self) -> None:
        for rank, code in self._live_processes.exit_codes().items():
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                why = ", perhaps by the kernel for lack of memory" if name == "SIGKILL" else ""
                self._raise_worker_lost(rank, f"was killed by {name}{why}")

    def _raise_worker_lost(self, rank: int, how: str) -> NoReturn:
        raise WorkerLost(f"{self.worker_name(rank)} {how}")
