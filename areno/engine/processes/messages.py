"""What travels over the pipe between the driver and a worker. To the worker: Command. Back: Reply, or Outputs."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areno.engine.processes.child import dumps
from areno.engine.spec import RolloutStats
from areno.errors import ArenoError, EngineError, Key
from areno.types import GenerationOutput


@dataclass
class Command:
    """One call of a worker's method."""

    method: str
    arguments: bytes  # pickled: read where the error of a bad one can be answered
    id: int | None  # None: nobody waits for an answer, only an error comes back


@dataclass
class Reply:
    """The end of a command, or an error that belongs to none."""

    id: int | None
    value: Any = None
    error: ArenoError | None = None


@dataclass
class Outputs:
    """What a worker sends while it decodes."""

    outputs: list[GenerationOutput]
    stats: RolloutStats


def pack(method: str, args: Sequence[Any]) -> bytes:
    """Arguments for a worker. EngineError where one of them cannot be sent."""
    try:
        return dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EngineError(
            "an argument of {} cannot be sent to a worker process ({}); bind plain values to a loss function with "
            "functools.partial, or use {}=inline",
            method, error, Key("engine.workers"),
        ) from None  # fmt: skip


class WorkerFailure(EngineError):
    """An exception that is not areno's own, in a worker."""


def portable(error: Exception, rank: int) -> ArenoError:
    """An error that survives pickling: ours as they are, others with their traceback as text."""
    if isinstance(error, ArenoError):
        return error
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailure(f"worker {rank} failed: {type(error).__name__}: {error}\n{text}")


def obey(worker: Any, method: str, args: Sequence[Any]) -> Any:
    """What a command returns: it names a method of the worker."""
    return getattr(worker, method)(*args)
