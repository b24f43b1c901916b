"""The only place that starts worker processes, sends them commands and ends them.

There are two forms with the same methods. `InlineGroup` keeps one worker in the driver's process, which starts fast and
is easy to debug. `SpawnedGroup` starts a process for each device. A command goes to the leader of every tensor-parallel
group, which passes it on to its peers. Requests may be sent while workers decode; outputs come back as they arise.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, NoReturn

from areno.engine.memory import out_of_memory_hint
from areno.engine.processes.child import dumps, follow_parent, without_main_module
from areno.engine.spec import EngineSpec, RolloutStats
from areno.errors import ArenoError, EngineError, Key
from areno.types import GenerationOutput

_STATS_EVERY_S = 0.5
_EXIT_GRACE_S = 2.0  # for a process to end by itself
_DEATH_GRACE_S = 2.0  # for a process whose connections are gone to be seen as ended
_FAILURE_GRACE_S = 5.0  # for the other ranks to answer a command that failed on one
# What to say where a command has no advice of its own.
_LESS_MEMORY = (
    "lower {}, {} or {}, or divide the model over more devices ({})", Key("rollout.mem_fraction"),
    Key("rollout.max_prefill_tokens"), Key("actor.mb_spec.max_tokens_per_mb"), Key("engine.tp_size"),
)  # fmt: skip


class InlineGroup:
    """One worker in this process. The docstrings of its methods hold for SpawnedGroup, too."""

    def __init__(self, spec: EngineSpec):
        from areno.engine.processes.process_groups import join_groups
        from areno.engine.worker import Worker

        self._worker: Worker | None = Worker(spec, join_groups(spec, 0))
        # Another thread may send while this one decodes, so what is cast waits for the next poll or call.
        self._inbox: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()

    @property
    def worker(self) -> Any:
        if self._worker is None:
            raise EngineError("the engine is closed")
        return self._worker

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run a method on every worker; the results of each data-parallel rank, in order."""
        self._run_casts()
        return [getattr(self.worker, method)(*args)]

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Like call, with other arguments for each data-parallel rank."""
        return self.call(method, *args[0])

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        """Send without waiting for an answer. An error is raised by a later poll or call. Any thread may call this."""
        self._inbox.put((method, args))

    def _run_casts(self) -> None:
        while not self._inbox.empty():
            method, args = self._inbox.get()
            getattr(self.worker, method)(*args)

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """What the decoders returned: finished samples and partial ones, or nothing after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._run_casts()
            if not self.worker.has_work:
                return []
            if (outputs := self.worker.step()) or time.monotonic() > deadline:
                return outputs

    def stats(self) -> list[RolloutStats]:
        """The latest counters of each data-parallel rank."""
        return [self.worker.rollout_stats()]

    def close(self) -> None:
        """Free devices and end processes; may be called again."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


# What travels over a pipe. To the worker: _Command. Back: _Reply to a command, or _Outputs while it decodes.
@dataclass
class _Command:
    method: str
    arguments: bytes  # pickled: read where the error of a bad one can be answered
    id: int | None  # None: nobody waits for an answer, only an error comes back


@dataclass
class _Reply:
    id: int | None
    value: Any = None
    error: ArenoError | None = None


@dataclass
class _Outputs:
    outputs: list[GenerationOutput]
    stats: RolloutStats


class SpawnedGroup:
    """One process for each device. A worker that dies is an EngineError in the driver, within seconds."""

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._ready: list[GenerationOutput] = []
        self._stats = [RolloutStats() for _ in range(spec.dp_size)]
        self._last_id = 0  # of the command waited for; 0 is the start
        self._replies: dict[int, _Reply] = {}  # to that command, by rank
        self._error: ArenoError | None = None  # of a command that nobody waits for, or of decoding
        try:
            self._start()
            self._collect()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # The ranks meet at a port that the driver opens, so that nobody else can take it; rank 0 listens there.
        with socket.create_server((self._spec.addresses[0].host, 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(self._spec.world_size):
                mine, theirs = context.Pipe()
                args = (theirs, self._spec, rank, port, listener if rank == 0 else None)
                process = context.Process(target=_worker_main, args=args, name=f"areno-worker-{rank}", daemon=True)
                with without_main_module():
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(mine)

    @property
    def _leaders(self) -> range:
        return range(0, self._spec.world_size, self._spec.tp_size)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.call_each(method, [args] * self._spec.dp_size)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        packed = [_pack(method, each) for each in args]  # nothing is sent where one of them cannot be
        self._last_id += 1
        self._replies = {}
        for rank, arguments in zip(self._leaders, packed, strict=True):
            self._send(rank, _Command(method, arguments, self._last_id))
        return self._collect()

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        self._send(self._leaders[dp_rank], _Command(method, _pack(method, args), None))

    def poll(self, timeout: float) -> list[GenerationOutput]:
        if not self._ready:
            self._receive(timeout)
        self._raise_error()
        ready, self._ready = self._ready, []
        return ready

    def stats(self) -> list[RolloutStats]:
        return self._stats

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for a command sees the end of its pipe and ends
        deadline = time.monotonic() + _EXIT_GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()  # of no effect on one that has ended
            process.join()
            process.close()
        self._processes, self._pipes = [], []

    def _send(self, rank: int, command: _Command) -> None:
        if not self._pipes:
            raise EngineError("the engine is closed")
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

    def _take(self, rank: int, message: _Reply | _Outputs) -> None:
        if isinstance(message, _Outputs):
            self._ready.extend(message.outputs)
            self._stats[rank // self._spec.tp_size] = message.stats
        elif message.id is None:
            self._error = self._error or message.error
        elif message.id == self._last_id:  # the rest answers an earlier command that failed on another rank
            self._replies[rank] = message

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        for reply in self._replies.values():
            error = error or reply.error
        if error is not None:
            self._replies = {}
            # A rank that lost the connection to a killed one may say so before the end of that one is seen.
            deadline = time.monotonic() + _DEATH_GRACE_S
            while isinstance(error, _WorkerFailure) and len(self._processes) > 1 and time.monotonic() < deadline:
                self._raise_if_killed()
                time.sleep(0.02)
            raise error

    def _raise_death(self, rank: int) -> NoReturn:
        self._processes[rank].join(_EXIT_GRACE_S)
        self._raise_if_killed()  # others may end because one was killed
        self._raise_error()  # what a worker sent says more than its end
        code = self._processes[rank].exitcode
        self._raise_end(rank, "stopped answering" if code is None else f"ended with exit code {code}")

    def _raise_if_killed(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                why = " (perhaps by the system, for lack of memory)" if name == "SIGKILL" else ""
                self._raise_end(rank, f"was killed by {name}{why}")

    def _raise_end(self, rank: int, how: str) -> NoReturn:
        raise EngineError(f"worker {rank} ({self._spec.addresses[rank]}) {how}; the run cannot go on")


def _pack(method: str, args: Sequence[Any]) -> bytes:
    try:
        return dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EngineError(
            "an argument of {} cannot be sent to a worker process ({}); bind plain values to a loss function with "
            "functools.partial, or use {}=inline",
            method, error, Key("engine.workers"),
        ) from None  # fmt: skip


def _worker_main(pipe: Any, spec: EngineSpec, rank: int, port: int, listener: socket.socket | None) -> None:
    """Body of a worker process."""
    follow_parent()
    try:
        import torch.distributed as dist

        from areno.engine.processes.process_groups import join_groups
        from areno.engine.worker import Worker

        context = join_groups(spec, rank, port, listener)
        worker = Worker(spec, context)
        pipe.send(_Reply(0))
    except Exception as error:
        pipe.send(_Reply(0, error=_portable(error, rank)))
        _leave(1)
    inbox: SimpleQueue[_Command | None] = SimpleQueue()
    if context.leads:
        threading.Thread(target=_fill, args=(pipe, inbox), daemon=True, name="areno-commands").start()
    try:
        _serve(pipe, inbox, worker, context)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the driver closed the group
    except Exception as error:
        with suppress(BrokenPipeError, ConnectionResetError):  # a peer failed, and the driver closed the group over it
            pipe.send(_Reply(None, error=_portable(error, rank)))
        _leave(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    _leave(0)


def _leave(code: int) -> NoReturn:
    """A regular exit of an interpreter with torch takes a second, and torch may complain of a group left open."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fill(pipe: Any, inbox: SimpleQueue[_Command | None]) -> None:
    """Read commands as they arrive, so that the driver never waits in a send for a worker that waits in one itself."""
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)


def _serve(pipe: Any, inbox: SimpleQueue[_Command | None], worker: Any, context: Any) -> None:
    """Obey commands until the driver closes the pipe; decode whenever there is something to decode."""
    last_stats = 0.0
    while True:
        for command in _commands(inbox, worker, context):
            if command is None:
                return
            reply = _Reply(command.id)
            try:
                args = pickle.loads(command.arguments)
                with out_of_memory_hint(f"in {command.method}", *_LESS_MEMORY):
                    value = getattr(worker, command.method)(*args)
                reply.value = value if context.leads else None
            except Exception as error:
                reply.error = _portable(error, context.rank)
            if command.id is not None or (reply.error is not None and context.leads):
                pipe.send(reply)
        if worker.has_work:
            outputs = worker.step()
            now = time.monotonic()
            if context.leads and (outputs or now - last_stats > _STATS_EVERY_S):
                pipe.send(_Outputs(outputs, worker.rollout_stats()))
                last_stats = now


def _commands(inbox: SimpleQueue[_Command | None], worker: Any, context: Any) -> list[_Command | None]:
    """The commands that have arrived; waits for one when there is nothing to decode. None stands for the end.

    A leader shares them with its tensor-parallel peers, so all of them act on the same commands at the same step.
    """
    commands: list[_Command | None] = []
    if context.leads:
        while not inbox.empty() or not (commands or worker.has_work):
            commands.append(inbox.get())
    if context.tp.size > 1:
        import torch.distributed as dist

        box = [commands]
        dist.broadcast_object_list(box, src=context.rank - context.tp.rank, group=context.control)
        commands = box[0]
    return commands


class _WorkerFailure(EngineError):
    """An exception that is not areno's own, in a worker."""


def _portable(error: Exception, rank: int) -> ArenoError:
    """An error that survives pickling: ours as they are, others with their traceback as text."""
    if isinstance(error, ArenoError):
        return error
    text = "".join(traceback.format_exception(error)).rstrip()
    return _WorkerFailure(f"worker {rank} failed: {type(error).__name__}: {error}\n{text}")


WorkerGroup = InlineGroup | SpawnedGroup


def start_workers(spec: EngineSpec, mode: str) -> WorkerGroup:
    """The group for a spec; `mode` is engine.workers: auto (inline for one CPU device), inline or spawn."""
    if mode == "inline" and spec.world_size > 1:
        raise EngineError(
            "{}=inline holds one device, not {}; use spawn", Key("engine.workers"), ", ".join(spec.devices)
        )
    if mode == "inline" or (mode == "auto" and spec.devices == ["cpu"]):
        return InlineGroup(spec)
    return SpawnedGroup(spec)
