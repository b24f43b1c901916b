"""The main function of a worker process. The worker executes commands, and decodes while it has requests."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn

from areno import heartbeat, trace
from areno.cost.remedies import MORE_DEVICES
from areno.engine.device_memory import out_of_memory_hint, process_resident_bytes
from areno.engine.processes.child import exit_with_parent
from areno.engine.processes.messages import Command, Reply, WorkerOutputs, execute, picklable_error
from areno.engine.processes.stack_traces import StackTraceServer
from areno.engine.processes.watchdog import Heartbeat
from areno.errors import ArenoError, Key, WorkerLost
from areno.specs.engine import EngineSpec

_STATS_EVERY_S = 0.5
_OUTPUTS_AT_ONCE = 256  # of a step in a message, so that the driver reads one while the worker packs the next
# Advice for an out-of-memory error in a command without advice of its own.
_LESS_MEMORY = (
    ("lower {}", Key("rollout.mem_fraction")),
    ("lower {}", Key("rollout.max_prefill_tokens")),
    ("lower {}", Key("actor.mb_spec.max_tokens_per_mb")),
    MORE_DEVICES,
)


def worker_main(
    pipe: Any,
    spec: EngineSpec,
    rank: int,
    port: int,
    listener: socket.socket | None,
    counters: Any,
    stack_trace_pipe: Any,
) -> None:
    """Run one worker process until the driver closes its pipe, then exit the process.

    `pipe` carries Command, Reply and WorkerOutputs. `port` is the rendezvous port, and rank 0 gets the `listener` at
    it. `counters` are shared memory. Through `stack_trace_pipe` the driver asks for stack traces.
    """
    exit_with_parent()
    own_heartbeat = Heartbeat(counters, rank)
    _stacks = StackTraceServer(stack_trace_pipe, with_collectives=spec.world_size > 1)
    try:
        import torch.distributed as dist

        from areno.engine.deterministic import begin_deterministic
        from areno.engine.processes.process_groups import join_groups
        from areno.engine.worker import Worker

        if spec.engine.deterministic:
            begin_deterministic(spec.devices[rank], spec.world_size)
        gc.freeze()  # scanning all imported objects would delay a step by a tenth of a second
        context = join_groups(spec, rank, port, listener)
        worker = Worker(spec, context)
        own_heartbeat.finish_command(decodes=False)
        pipe.send(Reply(0))
    except Exception as error:
        with suppress(BrokenPipeError, ConnectionResetError):
            pipe.send(Reply(0, error=picklable_error(error, rank)))
            _exit_process(1)
        _exit_process(0)  # the driver has closed the group, for example after Ctrl-C
    inbox: SimpleQueue[Command | None] = SimpleQueue()
    if context.is_leader:
        threading.Thread(target=_read_commands, args=(pipe, inbox), daemon=True, name="areno-commands").start()
    try:
        _execute_and_decode(pipe, inbox, worker, context, own_heartbeat)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the driver closed the group
    except Exception as error:
        with suppress(BrokenPipeError, ConnectionResetError):  # another rank failed, so the driver has closed the group
            pipe.send(Reply(None, error=_error_to_send(error, context)))
        _exit_process(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    _exit_process(0)


def _exit_process(code: int) -> NoReturn:
    """Flush stdout and stderr, and end the process at once.

    A regular exit of an interpreter with torch takes a second, and torch may warn about an open process group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read_commands(pipe: Any, inbox: SimpleQueue[Command | None]) -> None:
    """Move commands from the pipe to a queue as they arrive, and put None when the pipe ends. Runs in a thread.

    The thread keeps the pipe empty. Otherwise the driver and a worker that send to each other at the same time could
    both block.
    """
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)


def _execute_and_decode(
    pipe: Any, inbox: SimpleQueue[Command | None], worker: Any, context: Any, own_heartbeat: Heartbeat
) -> None:
    """Execute commands until the driver closes the pipe, and decode while there are requests.

    While it is idle, the worker calls `release_departed_blocks`, so that the next command does not have to wait for it.
    """
    last_stats = 0.0
    while True:
        for command in _receive_commands(inbox, worker, context):
            if command is None:
                return
            reply = Reply(command.id)
            try:
                args = pickle.loads(command.arguments)
                with out_of_memory_hint(f"in {command.method}", lambda: _LESS_MEMORY):
                    value = execute(worker, command.method, args)
                reply.value = value if context.is_leader else None
            except Exception as error:
                reply.error = _error_to_send(error, context)
            own_heartbeat.finish_command(worker.has_work)
            if command.id is not None or (reply.error is not None and context.is_leader):
                reply.events, reply.host_bytes = trace.drain_events(), process_resident_bytes()
                pipe.send(reply)
        if not worker.has_work and inbox.empty():
            worker.release_departed_blocks()
        if worker.has_work:
            outputs = worker.step()
            heartbeat.beat()
            now = time.monotonic()
            if context.is_leader and (outputs or now - last_stats > _STATS_EVERY_S):
                own_heartbeat.set_decoding(False)  # the send below may wait for the driver to read
                stats = worker.rollout_stats()
                for first in range(0, len(outputs) or 1, _OUTPUTS_AT_ONCE):
                    pipe.send(WorkerOutputs(outputs[first : first + _OUTPUTS_AT_ONCE], stats))
                last_stats = now
            own_heartbeat.set_decoding(worker.has_work)


def _receive_commands(inbox: SimpleQueue[Command | None], worker: Any, context: Any) -> list[Command | None]:
    """Return the commands that have arrived, None for a closed pipe. Waits if there is nothing to decode.

    The leader of a tensor-parallel group broadcasts the commands, so that all ranks execute them at the same step.
    """
    commands: list[Command | None] = []
    if context.is_leader:
        while not inbox.empty() or not (worker.has_work or commands):
            commands.append(inbox.get())
    if context.broadcast is None:
        return commands
    try:
        return context.broadcast.send(commands)
    except EOFError:  # the leader has ended, which the driver notices
        return [None]


def _error_to_send(error: Exception, context: Any) -> ArenoError:
    """Return the error to send to the driver. It is WorkerLost if the CUDA device no longer works."""
    told = picklable_error(error, context.rank)
    if context.device.type == "cuda" and not isinstance(error, ArenoError):
        import torch

        try:
            torch.cuda.synchronize(context.device)
        except RuntimeError:
            return WorkerLost(f"worker {context.rank} lost its device ({context.device}): {told}")
    return told
