"""The only place that starts processes, sends them commands and ends them.

Two forms with one face: `InlineGroup` keeps the one worker in the driver (a CPU device: quick to start, easy to
debug), `SpawnedGroup` starts a process for each device. A command goes to the leader of every tensor-parallel group,
which hands it to its peers; requests may be sent while workers decode, and finished samples come back as they finish.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol

from areno.engine.process import dumps, hidden_main, settle_as_child
from areno.engine.spec import EngineSpec, RolloutStats
from areno.engine.types import GenerationOutput
from areno.errors import ArenoError, EngineError

_STATS_EVERY_S = 0.5
_GRACE_S = 2.0


class WorkerGroup(Protocol):
    """What the engine drives."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method on every worker; the leaders' results, in data-parallel order."""
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
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    id: int = 0  # 0: nobody waits for an answer, only an error comes back


@dataclass
class _Reply:
    id: int = 0
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
        self._last_id = 0
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
            self._collect(0)
        except BaseException:
            self.close()
            raise

    @property
    def _leaders(self) -> list[int]:
        return list(range(0, self._spec.world_size, self._spec.tp_size))

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.call_each(method, [args] * self._spec.dp_size, **kwargs)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        self._last_id += 1
        for rank, each in zip(self._leaders, args, strict=True):
            self._send(rank, _Command(method, each, kwargs, self._last_id))
        return self._collect(self._last_id)

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        self._send(self._leaders[dp_rank], _Command(method, args, {}))

    def poll(self, timeout: float) -> list[GenerationOutput]:
        if not self._ready:
            for rank, message in self._receive(timeout):
                self._take(rank, message)
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

    def _send(self, rank: int, command: _Command) -> None:
        if not self._pipes:
            raise EngineError("the engine is closed")
        try:
            payload = dumps(command)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EngineError(
                f"an argument of {command.method} cannot be sent to a worker process ({error}); bind plain values to a "
                "loss function with functools.partial, or use engine.workers=inline"
            ) from None
        try:
            self._pipes[rank].send_bytes(payload)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_death(rank)

    def _collect(self, command_id: int) -> list[Any]:
        """Wait for every leader's reply to a command; what is left of an earlier, failed one is dropped."""
        replies: dict[int, Any] = {}
        while len(replies) < len(self._leaders):
            for rank, message in self._receive(None):
                if self._take(rank, message) and message.id == command_id:
                    replies[rank] = message.value
        return [replies[rank] for rank in self._leaders]

    def _take(self, rank: int, message: _Reply | _Outputs) -> bool:
        """Sort in one message; True if it is a reply."""
        if isinstance(message, _Outputs):
            self._ready.extend(message.outputs)
            self._stats[rank // self._spec.tp_size] = message.stats
            return False
        if message.error is not None:
            raise message.error
        return True

    def _receive(self, timeout: float | None) -> list[tuple[int, Any]]:
        """Messages that are there, waiting up to `timeout` seconds for the first. Raises when a worker is gone."""
        if not self._pipes:
            raise EngineError("the engine is closed")
        sentinels = [process.sentinel for process in self._processes]
        ready = set(connection.wait([*self._pipes, *sentinels], timeout))
        messages = []
        for rank, pipe in enumerate(self._pipes):
            if pipe in ready:
                try:
                    messages.append((rank, pipe.recv()))
                except (EOFError, ConnectionResetError):
                    self._raise_death(rank)
        if not messages:
            for rank, sentinel in enumerate(sentinels):
                if sentinel in ready:
                    self._raise_death(rank)
        return messages

    def _raise_death(self, rank: int) -> None:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}" + (
                " (perhaps by the system, for lack of memory)" if name == "SIGKILL" else ""
            )
        else:
            how = f"ended with exit code {code}"
        raise EngineError(f"worker {rank} ({self._spec.devices[rank]}) {how}; the run cannot go on")


def _worker_main(pipe: Any, spec: EngineSpec, rank: int, rendezvous: str) -> None:
    """Body of a worker process."""
    settle_as_child()
    import torch

    from areno.engine.parallel import leave, take_place
    from areno.engine.worker import Worker

    if spec.devices[rank] == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // spec.world_size))
    try:
        place = take_place(spec, rank, rendezvous)
        worker = Worker(spec, place)
    except Exception as error:
        pipe.send(_Reply(error=_portable(error, rank)))
        return
    if place.leads:
        pipe.send(_Reply())
    try:
        _serve(pipe, worker, place)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the driver closed the group
    except Exception as error:
        pipe.send(_Reply(error=_portable(error, rank)))
    finally:
        leave()


def _serve(pipe: Any, worker: Any, place: Any) -> None:
    """Take commands until the pipe closes; decode whenever there is something to decode."""
    last_stats = 0.0
    while True:
        for command in _commands(pipe, worker, place):
            if command is None:
                return
            try:
                reply = _Reply(command.id, getattr(worker, command.method)(*command.args, **command.kwargs))
            except Exception as error:
                reply = _Reply(command.id, error=_portable(error, place.rank))
            if (command.id and place.leads) or reply.error is not None:
                pipe.send(reply)
        if worker.has_work:
            outputs = worker.step()
            now = time.monotonic()
            if place.leads and (outputs or now - last_stats > _STATS_EVERY_S):
                pipe.send(_Outputs(outputs, worker.rollout_stats()))
                last_stats = now


def _commands(pipe: Any, worker: Any, place: Any) -> list[_Command | None]:
    """The commands that have arrived; waits for one when there is nothing to decode. None stands for the end.

    A leader shares them with its tensor-parallel peers, so all of them act on the same commands at the same step.
    """
    commands: list[_Command | None] = []
    if place.leads:
        try:
            if not worker.has_work:
                commands.append(pipe.recv())
            while pipe.poll(0):
                commands.append(pipe.recv())
        except (EOFError, ConnectionResetError):
            commands.append(None)
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
    text = "".join(traceback.format_exception(error)).rstrip()
    return EngineError(f"worker {rank} failed: {type(error).__name__}: {error}\n{text}")


def start_workers(spec: EngineSpec, mode: str) -> WorkerGroup:
    """The group for a spec; `mode` is engine.workers: auto, inline or spawn."""
    inline_possible = spec.devices == ["cpu"]
    if mode == "inline" and not inline_possible:
        raise EngineError(f"engine.workers=inline holds one CPU device, not {', '.join(spec.devices)}; use spawn")
    if mode == "spawn" or not inline_possible:
        return SpawnedGroup(spec)
    return InlineGroup(spec)
