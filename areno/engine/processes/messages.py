"""What travels over the pipe between the driver and a worker. To the worker: Command. Back: Reply, or Outputs."""

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
    outputs, start = [], 0
    for n_tokens, of_one, others in zip(lengths, versions, rest, strict=True):
        place = slice(start, start + n_tokens)
        start += n_tokens
        of_tokens: Any = np.full(n_tokens, of_one[0]) if len(of_one) == 1 else of_one
        values: Any = (tokens[place], logprobs[place], of_tokens, *others)
        outputs.append(GenerationOutput(**dict(zip(_FIELDS, values, strict=True))))
    return Outputs(outputs, stats)


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
