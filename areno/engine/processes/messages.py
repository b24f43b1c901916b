"""Messages between the driver and a worker: Command to the worker, Reply and Outputs to the driver.

`pack` pickles the arguments of a command in the driver, and `execute` calls the method in the worker. `portable` turns
any exception into an exception that can be pickled.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any

import numpy as np

from areno import trace
from areno.engine import profiling
from areno.engine.processes.child import dumps
from areno.engine.spec import RolloutStats
from areno.errors import ArenoError, EngineError, Key
from areno.types import GenerationOutput

_NUMBERS = (
    "tokens",
    "logprobs",
    "versions",
)  # sent as arrays; other fields of an output are pickled
_REST = tuple(field.name for field in fields(GenerationOutput) if field.name not in _NUMBERS)
_FIELDS = (*_NUMBERS, *_REST)
_of_fields = itemgetter(*_FIELDS)
_LEAST_NS = 20_000  # a shorter command is not worth an event of the trace


@dataclass
class Command:
    """One call of a worker's method, sent by the driver.

    Attributes:
        method: Name of the method.
        arguments: Pickled positional arguments. The worker unpickles them separately, so that it can reply with an
            error if unpickling fails.
        id: Number of the command, which the Reply repeats. None if the driver does not wait for a reply. The worker
            then replies only if the command fails.
    """

    method: str
    arguments: bytes
    id: int | None


@dataclass
class Reply:
    """The result of a command, sent by a worker.

    Attributes:
        id: Number of the command. None for an error in a command without a number, and for an error while decoding.
        value: Return value of the method. None from ranks that are not the leader (rank 0) of their tensor-parallel
            group.
        error: The error that the method raised. None if the command succeeded.
        events: Events of the trace since the last reply. Empty unless the run is traced.
        host_bytes: Host memory that the worker has in use.
    """

    id: int | None
    value: Any = None
    error: ArenoError | None = None
    events: list[trace.Event] = field(default_factory=list)
    host_bytes: int = 0


@dataclass
class Outputs:
    """Outputs and statistics that a worker sends to the driver while it decodes.

    Attributes:
        outputs: Finished samples, and new tokens of unfinished samples.
        stats: Latest statistics of the worker's decoder.
    """

    outputs: list[GenerationOutput]
    stats: RolloutStats

    def __reduce__(self) -> tuple[Any, ...]:
        # Send few arrays and lists: pickling the fields of each sample would take several times as long.
        if not self.outputs:
            return Outputs, ([], self.stats)
        columns = zip(*map(_of_fields, map(vars, self.outputs)), strict=True)
        tokens, logprobs, versions, *rest = columns
        return _outputs_of, (
            np.concatenate(tokens, dtype=np.int32, casting="unsafe"),
            np.concatenate(logprobs, dtype=np.float64, casting="unsafe"),
            _runs(np.concatenate(versions, dtype=np.int64, casting="unsafe")),
            np.fromiter(map(len, tokens), np.int64, len(tokens)),
            rest,
            self.stats,
        )


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the value and the length of each run of equal values, int64. Few versions of weights sample all tokens."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[starts], np.diff(starts, append=len(values))


def _outputs_of(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    versions: tuple[np.ndarray, np.ndarray],
    lengths: np.ndarray,
    rest: Sequence[Sequence[Any]],
    stats: RolloutStats,
) -> Outputs:
    """Rebuild an Outputs object when it is unpickled, from arrays that hold the tokens of all samples in a row.

    Args:
        tokens: Token ids of all samples, int32, shape [sum(lengths)].
        logprobs: Log-probabilities of these tokens, float64, shape [sum(lengths)].
        versions: Weights versions of these tokens, as `_runs` returns them.
        lengths: Number of tokens of each sample, int64.
        rest: For each of the fields in `_REST`, its value in each sample.
        stats: Statistics of the worker's decoder.
    """
    ends, versions_N = np.cumsum(lengths).tolist(), np.repeat(*versions)
    places = map(slice, [0, *ends], ends)
    numbers = ((tokens[place], logprobs[place], versions_N[place]) for place in places)
    found = [
        GenerationOutput.of_fields(dict(zip(_FIELDS, (*three, *others), strict=True)))
        for three, *others in zip(numbers, *rest, strict=True)
    ]
    return Outputs(found, stats)


def pack(method: str, args: Sequence[Any]) -> bytes:
    """Pickle the arguments of a command.

    Args:
        method: Name of the worker's method, for the error message.
        args: Positional arguments of the method.

    Returns:
        The bytes for `Command.arguments`.

    Raises:
        EngineError: An argument cannot be pickled.
    """
    try:
        return dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        text = "an argument of {} cannot be sent to a worker process ({}); bind plain values to a loss function with "
        text += "functools.partial, or use {}=inline"
        raise EngineError(text, method, error, Key("engine.workers")) from None


class WorkerFailure(EngineError):
    """An exception inside a worker that areno did not raise itself, such as an error from torch."""


def portable(error: Exception, rank: int) -> ArenoError:
    """Return an error that can be pickled and sent to the driver.

    Args:
        error: The exception that a worker caught.
        rank: Global rank of the worker, for the message.

    Returns:
        `error` itself if it is an ArenoError. Otherwise a WorkerFailure whose message includes the traceback.
    """
    if isinstance(error, ArenoError):
        return error
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailure(f"worker {rank} failed: {type(error).__name__}: {error}\n{text}")


def execute(worker: Any, method: str, args: Sequence[Any]) -> Any:
    """Call the method named `method` on a worker, and return its result.

    Args:
        worker: The worker object.
        method: Name of the method.
        args: Positional arguments.
    """
    call = getattr(worker, method)
    if not trace.active:
        return call(*args)
    start = trace.now()
    try:
        return call(*args)
    finally:
        end = trace.now()
        if method != "step" and end - start > _LEAST_NS:  # a decoding step has events of its own
            trace.add(f"rank {worker.context.rank}/commands", method, start, end)
        profiling.settle()
