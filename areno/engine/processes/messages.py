"""Messages between the driver and a worker: Command to the worker, Reply and WorkerOutputs to the driver.

`pack_command` pickles the arguments of a command in the driver, and `execute` calls the method in the worker.
`picklable_error` turns any exception into an exception that can be pickled.
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
from areno.engine.reports import RolloutStats
from areno.errors import ArenoError, EngineError, Key
from areno.types import GenerationOutput

_NUMBERS = ("tokens", "logprobs", "versions")  # sent as arrays; other fields of an output are pickled
_REST = tuple(field.name for field in fields(GenerationOutput) if field.name not in _NUMBERS)
_FIELDS = (*_NUMBERS, *_REST)
_of_fields = itemgetter(*_FIELDS)
_LEAST_NS = 20_000  # a shorter command is not worth an event of the trace


@dataclass
class Command:
    """One call of a worker's method, sent by the driver."""

    method: str
    arguments: bytes  # pickled separately, so that the worker can reply with an error if unpickling fails
    id: int | None  # None if the driver does not wait; the worker then replies only with an error


@dataclass
class Reply:
    """The result of a command, sent by a worker."""

    id: int | None  # None for an error in a command without a number, and for an error while decoding
    value: Any = None  # of the method, from leaders of tensor-parallel groups
    error: ArenoError | None = None
    events: list[trace.Event] = field(default_factory=list)  # of the trace since the last reply
    host_bytes: int = 0  # in use by the worker


@dataclass
class WorkerOutputs:
    """Outputs and statistics that a worker sends to the driver while it decodes."""

    outputs: list[GenerationOutput]
    stats: RolloutStats

    def __reduce__(self) -> tuple[Any, ...]:
        # Send few arrays and lists: pickling the fields of each sample would take several times as long.
        if not self.outputs:
            return WorkerOutputs, ([], self.stats)
        columns = zip(*map(_of_fields, map(vars, self.outputs)), strict=True)
        tokens, logprobs, versions, *rest = columns
        return _outputs_from_arrays, (
            np.concatenate(tokens, dtype=np.int32, casting="unsafe"),
            np.concatenate(logprobs, dtype=np.float64, casting="unsafe"),
            _run_length_encode(np.concatenate(versions, dtype=np.int64, casting="unsafe")),
            np.fromiter(map(len, tokens), np.int64, len(tokens)),
            rest,
            self.stats,
        )


def _run_length_encode(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the value and the length of each run of equal values. Versions of weights have few such runs."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[starts], np.diff(starts, append=len(values))


def _outputs_from_arrays(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    versions: tuple[np.ndarray, np.ndarray],
    lengths: np.ndarray,
    rest: Sequence[Sequence[Any]],
    stats: RolloutStats,
) -> WorkerOutputs:
    """Rebuild WorkerOutputs. The arrays are of all samples. `versions` are run lengths, `rest` the `_REST` fields."""
    ends, versions_N = np.cumsum(lengths).tolist(), np.repeat(*versions)
    places = map(slice, [0, *ends], ends)
    numbers = ((tokens[place], logprobs[place], versions_N[place]) for place in places)
    found = [
        GenerationOutput.from_fields(dict(zip(_FIELDS, (*three, *others), strict=True)))
        for three, *others in zip(numbers, *rest, strict=True)
    ]
    return WorkerOutputs(found, stats)


def pack_command(method: str, args: Sequence[Any]) -> bytes:
    try:
        return dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        text = "an argument of {} cannot be sent to a worker process ({}); bind plain values to a loss function with "
        text += "functools.partial, or use {}=inline"
        raise EngineError(text, method, error, Key("engine.workers")) from None


class WorkerFailure(EngineError):
    """An exception inside a worker that areno did not raise itself, such as an error from torch."""


def picklable_error(error: Exception, rank: int) -> ArenoError:
    """Return an error that can be pickled. If areno did not raise it, it becomes a WorkerFailure with traceback."""
    if isinstance(error, ArenoError):
        return error
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailure(f"worker {rank} failed: {type(error).__name__}: {error}\n{text}")


def execute(worker: Any, method: str, args: Sequence[Any]) -> Any:
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
        profiling.record_finished_phases()
