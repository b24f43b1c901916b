"""Messages between the driver and a worker: Command to the worker, Reply and Outputs to the driver.

`pack` and `execute` are the two ends of a command; `portable` makes an exception fit for pickling.
"""

from __future__ import annotations

import itertools
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np

from areno.engine.processes.child import dumps
from areno.engine.spec import RolloutStats
from areno.errors import ArenoError, EngineError, Key
from areno.types import GenerationOutput

_NUMBERS = ("tokens", "logprobs", "versions")  # of an output; the rest of it travels as it is
_REST = tuple(field.name for field in fields(GenerationOutput) if field.name not in _NUMBERS)
_FIELDS = (*_NUMBERS, *_REST)
_rest_of = attrgetter(*_REST)


@dataclass
class Command:
    """One call of a worker's method.

    Attributes:
        method: Name of the method.
        arguments: Pickled arguments. The worker unpickles them where an error can be answered.
        id: Number of the command. None if the driver waits for no reply; then only an error comes back.
    """

    method: str
    arguments: bytes  # pickled: read where the error of a bad one can be answered
    id: int | None  # None: nobody waits for an answer, only an error comes back


@dataclass
class Reply:
    """The result of a command, or an error that belongs to no command (`id` is None)."""

    id: int | None
    value: Any = None
    error: ArenoError | None = None


@dataclass
class Outputs:
    """Samples and counters that a worker sends while it decodes."""

    outputs: list[GenerationOutput]
    stats: RolloutStats

    def __reduce__(self) -> tuple[Any, ...]:
        # To the driver go two arrays: it would take longer to read the numbers of each sample, and needs arrays anyway.
        lengths = [len(output.tokens) for output in self.outputs]
        tokens, logprobs = ([getattr(output, name) for output in self.outputs] for name in ("tokens", "logprobs"))
        return _outputs_of, (
            np.fromiter(itertools.chain.from_iterable(tokens), np.int32, sum(lengths)),
            np.fromiter(itertools.chain.from_iterable(logprobs), np.float64, sum(lengths)),
            # Versions only grow within a sample, and hardly ever do.
            [each.versions[: 1 if each.versions[:1] == each.versions[-1:] else None] for each in self.outputs],
            lengths,
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
    """Unpickle Outputs: split the arrays of all samples."""
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
    """An exception inside of a worker that is not one of areno's own."""


def portable(error: Exception, rank: int) -> ArenoError:
    """Return an exception that survives pickling. Errors of others become a WorkerFailure with their traceback."""
    if isinstance(error, ArenoError):
        return error
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailure(f"worker {rank} failed: {type(error).__name__}: {error}\n{text}")


def execute(worker: Any, method: str, args: Sequence[Any]) -> Any:
    """Call the method of a worker that a command names, and return its result."""
    return getattr(worker, method)(*args)
