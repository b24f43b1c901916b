"""Messages between the driver and a worker: Command to the worker, Reply and Outputs to the driver.

`pack` pickles the arguments of a command in the driver, and `execute` calls the method in the worker. `portable` turns
any exception into an exception that can be pickled.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
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
_rest_of = attrgetter(*_REST)
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
        # Send two arrays: the driver needs arrays, and would take longer to unpickle lists of each sample.
        tokens, logprobs, versions = (
            [np.asarray(vars(output)[name], dtype) for output in self.outputs]
            for name, dtype in (("tokens", np.int32), ("logprobs", np.float64), ("versions", np.int64))
        )
        return _outputs_of, (
            np.concatenate(tokens) if tokens else np.empty(0, np.int32),
            np.concatenate(logprobs) if logprobs else np.empty(0, np.float64),
            # Versions never decrease within a sample. If the first equals the last, all are equal.
            [each[: 1 if len(each) and each[0] == each[-1] else None].tolist() for each in versions],
            [len(each) for each in tokens],
            [_rest_of(output) for output in self.outputs],
            self.stats,
        )


def _outputs_of(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    versions: Sequence[list[int]],
    lengths: Sequence[int],
    rest: Sequence[tuple[Any, ...]],
    stats: RolloutStats,
) -> Outputs:
    """Rebuild an Outputs object when it is unpickled, from arrays that hold the tokens of all samples in a row.

    Args:
        tokens: Token ids of all samples, int32, shape [sum(lengths)].
        logprobs: Log-probabilities of these tokens, float64, shape [sum(lengths)].
        versions: Per sample, the weights version of each token, or a single version if all tokens share it.
        lengths: Number of tokens of each sample.
        rest: Per sample, the values of the remaining fields of GenerationOutput, in the order of `_REST`.
        stats: Statistics of the worker's decoder.
    """
    outputs, start = [], 0
    for n_tokens, of_one, others in zip(lengths, versions, rest, strict=True):
        place = slice(start, start + n_tokens)
        start += n_tokens
        of_tokens: Any = np.full(n_tokens, of_one[0]) if len(of_one) == 1 else of_one
        values: Any = (tokens[place], logprobs[place], of_tokens, *others)
        outputs.append(GenerationOutput(**dict(zip(_FIELDS, values, strict=True))))
    return Outputs(outputs, stats)


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
