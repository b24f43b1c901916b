"""The code of a reward process: imports the reward functions and calls them for the records that it receives.

areno/rewards/pool.py sends the records. The keeper of the process (areno/user_processes/keeper.py) ends it together
with all processes that the functions started. To start quickly, this module imports little, and asyncio only if a
function needs it.

Messages are pickled over one socket. The process receives (functions, key, timeout_s, tracebacks) once, then chunks
[(position, pickled record), ...]. It sends ("ready", is_async) or ("failed", Problems) once, then (position, Answer)
for each record as soon as it is scored.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from areno.errors import ArenoError, ConfigError, Problem, printable
from areno.files.user_code import describe_error, function_of, load_module
from areno.reward_fns.built_in import Reward
from areno.rewards.records import Answer, verdict
from areno.user_processes.process import MAX_TEXT, ForkedCopies, ForkReturned, event_loop, is_async, unpickle

if TYPE_CHECKING:
    import asyncio

Chunk = list[tuple[int, bytes]]

_MAX_TRACEBACK_CHARS = 4000  # characters of a message


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, as the driver sends it to a reward process.

    Attributes:
        code: `file:function`, a pickled function of a script, or a built-in reward.
        name: The name of its part of the reward; "" for the only function.
        weight: The factor of its value in the reward.
    """

    code: str | bytes | Reward
    name: str = ""
    weight: float = 1.0


def serve(connection: Connection) -> None:
    """Score until the driver closes the connection.

    Args:
        connection: The socket to the driver.

    Raises:
        ArenoError: A function does not load.
    """
    functions, key, timeout_s, tracebacks = connection.recv()
    copies = ForkedCopies(connection)
    try:
        with copies.user_code():
            loaded = _load(functions, key)
    except ForkReturned as error:
        raise ConfigError(Problem(key, f"{functions[0].name or 'reward_fn'}: importing it {error}")) from error
    scorer = _Scorer(connection, loaded, timeout_s, copies, tracebacks)
    connection.send(("ready", scorer.is_async))
    for function in loaded:
        if function.warm_up is not None:
            function.warm_up()
    while True:
        scorer.score(connection.recv())


@dataclass
class _Function:
    """A function that has been loaded.

    Attributes:
        call: Scores one record.
        name: See RewardFunction.
        weight: See RewardFunction.
        path: The file of the function, which messages of errors point to; None for a function of a script.
        is_async: Whether `call` returns a coroutine.
        warm_up: Makes the first calls as fast as later ones; None for functions of a user.
    """

    call: Callable[[Any], Any]
    name: str
    weight: float
    path: Path | None
    is_async: bool
    warm_up: Callable[[], None] | None = None


def _load(functions: list[RewardFunction], key: str) -> list[_Function]:
    """Import the functions, each file once. Raises ConfigError with all problems."""
    modules: dict[str, ModuleType] = {}
    loaded, problems = [], []
    for source in functions:
        name, path, warm_up = source.name or "reward_fn", None, None
        try:
            if isinstance(source.code, bytes):
                function = unpickle(source.code, key)
            elif isinstance(source.code, Reward):
                name, warm_up, function = source.code.name, source.code.warm_up, source.code.load()
                path = _file_of(function)
            else:
                file, _, name = source.code.rpartition(":")
                if file not in modules:
                    modules[file] = load_module(file, key)
                function, path = function_of(modules[file], name, file, key), Path(os.path.realpath(file))
            with contextlib.suppress(ValueError):  # some callables have no signature to look at
                inspect.signature(function).bind(None)
            loaded.append(_Function(function, source.name, source.weight, path, is_async(function), warm_up))
        except ArenoError as error:
            problems += error.problems
        except TypeError as error:
            problems.append(Problem(key, f"{name}(record) cannot be called: {error}"))
    if problems:
        raise ConfigError(problems)
    return loaded


def _file_of(function: Callable[[Any], Any]) -> Path:
    """Return the file of the function that a built-in reward has loaded."""
    return Path(inspect.getfile(function.func if isinstance(function, partial) else function))


@dataclass
class _Scorer:
    """Calls the functions and sends the answers.

    Attributes:
        connection: The socket to the driver.
        functions: The functions of the run.
        timeout_s: The time limit of async functions for one sample, in seconds.
        copies: Ends forked copies of this process that return from a function.
        tracebacks: Whether the message of an error is its traceback, and not one line.
        is_async: Whether one of the functions is async.
    """

    connection: Connection
    functions: list[_Function]
    timeout_s: float
    copies: ForkedCopies
    tracebacks: bool

    def __post_init__(self) -> None:
        self.is_async = any(function.is_async for function in self.functions)

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, which is made at its first use."""
        return event_loop(self.copies.end_copy)

    def score(self, chunk: Chunk) -> None:
        """Score the records of a chunk in order, or at the same time if a function is async."""
        if self.is_async:
            self.loop.run_until_complete(self._score_together(chunk))
            return
        for position, payload in chunk:
            try:
                record = pickle.loads(payload)
                with self.copies.user_code():
                    results = [self._finished(function.call(record)) for function in self.functions]
                answer = self._answer(results)
            except BaseException as error:
                answer = self._failure(error)
            self.connection.send((position, answer))

    def _finished(self, result: Any) -> Any:
        """Return the result of a call, after awaiting it if necessary."""
        return self.loop.run_until_complete(result) if inspect.isawaitable(result) else result

    async def _score_together(self, chunk: Chunk) -> None:
        """Score the records of a chunk at the same time."""
        import asyncio

        async def call(payload: bytes) -> list[Any]:
            record = pickle.loads(payload)
            with self.copies.user_code():
                # Plain functions come first. If one raises, no async call is left open.
                in_order = sorted(self.functions, key=lambda function: function.is_async)
                results = {function.name: function.call(record) for function in in_order}
                waiting = {name: result for name, result in results.items() if inspect.isawaitable(result)}
                if len(waiting) == 1:
                    [(name, result)] = waiting.items()
                    results[name] = await result
                else:
                    results |= dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
                return [results[function.name] for function in self.functions]

        async def one(position: int, payload: bytes) -> None:
            try:
                task = asyncio.ensure_future(call(payload))
                done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
                if not done:
                    task.cancel()
                    raise TimeoutError(f"no answer within {self.timeout_s:g} s (reward.timeout_s)")
                answer = self._answer(task.result())
            except BaseException as error:
                answer = self._failure(error)
            self.connection.send((position, answer))

        await asyncio.gather(*(one(position, payload) for position, payload in chunk))

    def _answer(self, results: list[Any]) -> Answer:
        """Combine what the functions returned."""
        return verdict([(f.name, f.weight, result) for f, result in zip(self.functions, results, strict=True)])

    def _failure(self, error: BaseException) -> Answer:
        """Describe an exception of a function."""
        if isinstance(error, ForkReturned):
            return Answer("error", None, str(error))
        status = "timeout" if _is_timeout(error) else "error"
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        path = next((f.path for f in self.functions if str(f.path) in files), None)
        if self.tracebacks:
            return Answer(status, None, _traceback(error)[-_MAX_TRACEBACK_CHARS:])
        return Answer(status, None, describe_error(error, path)[:MAX_TEXT])


def _is_timeout(error: BaseException) -> bool:
    """Return whether an exception is a TimeoutError. In Python 3.10, that of asyncio is a different class."""
    of_asyncio = sys.modules.get("asyncio")
    return isinstance(error, TimeoutError) or (of_asyncio is not None and isinstance(error, of_asyncio.TimeoutError))


def _traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without the frames of this file and with control characters escaped."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    lines = "".join(traceback.format_exception(type(error), error, at)).rstrip().split("\n")
    return "\n".join(map(printable, lines))
