"""The only place that starts processes, sends them commands and ends them.

Two forms with one face: `InlineGroup` keeps the one worker in the driver (one device: quick to start, easy to
debug), `SpawnedGroup` starts a process for each device. A command goes to the leader of every tensor-parallel group,
which hands it to its peers; requests may be sent while workers decode, and finished samples come back as they finish.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol

from areno.engine.process import dumps, hidden_main, settle_as_child
from areno.engine.spec import EngineSpec, RolloutStats
from areno.engine.types import GenerationOutput
from areno.errors import ArenoError, EngineError

_STATS_EVERY_S = 0.5
_GRACE_S = 2.0  # for a process to end by itself
_OTHERS_S = 5.0  # for the other ranks to answer a command that failed on one


class WorkerGroup(Protocol):
    """What the engine drives."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method on every worker; the results of each data-parallel rank, in order."""
        ...

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """Like call, with other arguments for each data-parallel rank."""
        ...

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        """Send without waiting for an answer."""
        ...

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Finished samples, as soon as there are some or after `timeout` seconds."""
        ...

    def stats(self) -> list[RolloutStats]:
        """The latest counters of each data-parallel rank."""
        ...

    def close(self) -> None:
        """Free devices and end processes; may be called again."""
        ...


class InlineGroup:
    """One worker in this process."""

    def __init__(self, spec: EngineSpec):
        from areno.engine.parallel import take_place
        from areno.engine.worker import Worker

        self._worker: Worker | None = Worker(spec, take_place(spec, 0, ""))

    @property
    def worker(self) -> Any:
        if self._worker is None:
            raise EngineError("the engine is closed")
        return self._worker

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args, **kwargs)]

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        return self.call(method, *args[0], **kwargs)

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        self.call(method, *args)

    def poll(self, timeout: float) -> list[GenerationOutput]:
        deadline = time.monotonic() + timeout
        while self.worker.has_work:
            if outputs := self.worker.step():
                return outputs
            if time.monotonic() > deadline:
                break
        return []

    def stats(self) -> list[RolloutStats]:
        return [self.worker.rollout_stats()]

    def close(self) -> None:
        self._worker = None


# What travels over a pipe. To the worker: _Command. Back: _Reply to a command, or _Outputs while it decodes.
@dataclass
class _Command:
    method: str
    arguments: bytes  # pickled (args, kwargs): read where the error of a bad one can be answered
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
    """One process for each device. A worker that dies ends the group with its traceback, within seconds."""

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="areno-")
        rendezvous = f"file://{self._folder.name}/rendezvous"
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._ready: list[GenerationOutput] = []
        self._stats = [RolloutStats() for _ in range(spec.dp_size)]
        self._last_id = 0  # of the command waited for; 0 is the start
        self._replies: dict[int, _Reply] = {}  # to that command, by rank
        self._error: ArenoError | None = None  # of a command that nobody waits for, or of decoding
        try:
            for rank in range(spec.world_size):
                mine, theirs = context.Pipe()
                process = context.Process(
                    target=_worker_main, args=(theirs, spec, rank, rendezvous), name=f"areno-worker-{rank}", daemon=True
                )
                with hidden_main():
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(mine)
            self._collect()
        except BaseException:
            self.close()
            raise

    @property
    def _leaders(self) -> range:
        return range(0, self._spec.world_size, self._spec.tp_size)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._command(method, [_pack(method, args, kwargs)] * self._spec.dp_size)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        return self._command(method, [_pack(method, each, kwargs) for each in args])

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        self._send(self._leaders[dp_rank], _Command(method, _pack(method, args, {}), None))

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
            pipe.close()  # a worker that waits for a command sees the end of its pipe and leaves
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def _command(self, method: str, arguments: Sequence[bytes]) -> list[Any]:
        self._last_id += 1
        self._replies = {}
        for rank, packed in zip(self._leaders, arguments, strict=True):
            self._send(rank, _Command(method, packed, self._last_id))
        return self._collect()

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
                deadline = deadline or time.monotonic() + _OTHERS_S
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
        elif message.id in (None, self._last_id):  # the rest answers an earlier command that failed on another rank
            if message.id is None:
                self._error = self._error or message.error
            else:
                self._replies[rank] = message

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        for reply in self._replies.values():
            error = error or reply.error
        if error is not None:
            self._replies = {}
            raise error

    def _raise_death(self, rank: int) -> NoReturn:
        self._processes[rank].join(_GRACE_S)
        codes = [process.exitcode for process in self._processes]
        # Others may end because of one that was killed; where none was, what a worker said tells more than its end.
        rank = next((rank for rank, code in enumerate(codes) if code is not None and code < 0), rank)
        code = codes[rank]
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}" + (
                " (perhaps by the system, for lack of memory)" if name == "SIGKILL" else ""
            )
        else:
            self._raise_error()
            how = "stopped answering" if code is None else f"ended with exit code {code}"
        raise EngineError(f"worker {rank} ({self._spec.devices[rank]}) {how}; the run cannot go on")


def _pack(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    try:
        return dumps((args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EngineError(
            f"an argument of {method} cannot be sent to a worker process ({error}); bind plain values to a loss "
            "function with functools.partial, or use engine.workers=inline"
        ) from None


def _worker_main(pipe: Any, spec: EngineSpec, rank: int, rendezvous: str) -> None:
    """Body of a worker process."""
    settle_as_child()
    try:
        from areno.engine.parallel import leave, take_place
        from areno.engine.worker import Worker

        place = take_place(spec, rank, rendezvous)
        worker = Worker(spec, place)
        pipe.send(_Reply(0))
    except Exception as error:
        pipe.send(_Reply(0, error=_portable(error, rank)))
        raise SystemExit(1) from None
    inbox: SimpleQueue[_Command | None] = SimpleQueue()
    if place.leads:
        threading.Thread(target=_fill, args=(pipe, inbox), daemon=True, name="areno-commands").start()
    try:
        _serve(pipe, inbox, worker, place)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the driver closed the group
    except Exception as error:
        pipe.send(_Reply(None, error=_portable(error, rank)))
        raise SystemExit(1) from None
    leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take down an interpreter that holds torch is a second's work for nothing


def _fill(pipe: Any, inbox: SimpleQueue[_Command | None]) -> None:
    """Read commands as they arrive, so that the driver never waits in a send for a worker that waits in one itself."""
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)


def _serve(pipe: Any, inbox: SimpleQueue[_Command | None], worker: Any, place: Any) -> None:
    """Obey commands until the driver closes the pipe; decode whenever there is something to decode."""
    last_stats = 0.0
    while True:
        for command in _commands(inbox, worker, place):
            if command is None:
                return
            reply = _Reply(command.id)
            try:
                args, kwargs = pickle.loads(command.arguments)
                value = getattr(worker, command.method)(*args, **kwargs)
                reply.value = value if place.leads else None
            except Exception as error:
                reply.error = _portable(error, place.rank)
            if command.id is not None or (reply.error is not None and place.leads):
                pipe.send(reply)
        if worker.has_work:
            outputs = worker.step()
            now = time.monotonic()
            if place.leads and (outputs or now - last_stats > _STATS_EVERY_S):
                pipe.send(_Outputs(outputs, worker.rollout_stats()))
                last_stats = now


def _commands(inbox: SimpleQueue[_Command | None], worker: Any, place: Any) -> list[_Command | None]:
    """The commands that have arrived; waits for one when there is nothing to decode. None stands for the end.

    A leader shares them with its tensor-parallel peers, so all of them act on the same commands at the same step.
    """
    commands: list[_Command | None] = []
    if place.leads:
        if not worker.has_work:
            commands.append(inbox.get())
        while not inbox.empty():
            commands.append(inbox.get())
    if place.tp.size > 1:
        import torch.distributed as dist

        box = [commands]
        dist.broadcast_object_list(box, src=place.rank - place.tp.rank, group=place.control)
        commands = box[0]
    return commands


def _portable(error: Exception, rank: int) -> ArenoError:
    """An error that survives pickling: ours as they are, others with their traceback as text."""
    if isinstance(error, ArenoError):
        return error
    if type(error).__name__ == "OutOfMemoryError":
        return EngineError(
            f"worker {rank} ran out of device memory ({error}); lower rollout.mem_fraction, rollout.max_prefill_tokens "
            "or actor.mb_spec.max_tokens_per_mb, or divide the model over more devices (engine.tp_size)"
        )
    text = "".join(traceback.format_exception(error)).rstrip()
    return EngineError(f"worker {rank} failed: {type(error).__name__}: {error}\n{text}")


def start_workers(spec: EngineSpec, mode: str) -> WorkerGroup:
    """The group for a spec; `mode` is engine.workers: auto (inline for one CPU device), inline or spawn."""
    if mode == "inline" and spec.world_size > 1:
        raise EngineError(f"engine.workers=inline holds one device, not {', '.join(spec.devices)}; use spawn")
    if mode == "inline" or (mode == "auto" and spec.devices == ["cpu"]):
        return InlineGroup(spec)
    return SpawnedGroup(spec)
