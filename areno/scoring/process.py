"""The code of a reward process, which imports the reward functions and calls them for each record.

pool.py exchanges pickled messages with this process over one socket. The process receives (functions, key, timeout_s,
tracebacks) once, then chunks [(position, pickled record), ...]. It sends ("ready", is_async) or ("failed", Problems)
once, then (position, tuple(answer)) as soon as a record is scored. Its supervisor (areno/user_processes/supervisor.py)
kills it together with all processes that the functions started. To start quickly, this module imports little, and
imports asyncio only if a function needs it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from areno.errors import ArenoError, ConfigError, Problem, printable
from areno.files.user_code import describe_error, get_user_function, load_module
from areno.reward_fns.built_in import Reward
from areno.scoring.records import RewardReply, combine_results
from areno.user_processes.process import MAX_TEXT, ForkedChildren, ForkReturned, is_async, new_event_loop, unpickle

if TYPE_CHECKING:
    import asyncio

    from areno.environments.package import EnvironmentPackage

Chunk = list[tuple[int, bytes]]

_MAX_TRACEBACK_CHARS = 4000  # characters of a message


@dataclass(frozen=True)
class RewardFunction:
    """A reward function as the driver sends it. If there are several, `name` is the name of its part of the reward."""

    code: str | bytes | Reward | EnvironmentPackage  # `file:function`, pickled function, built-in reward, environment
    name: str = ""
    weight: float = 1.0
    sources: Collection[str] | None = None  # whose samples it scores. None: all


def serve(connection: Connection) -> None:
    """Load the functions (or raise ArenoError), and score records until the driver closes the connection (EOFError)."""
    functions, key, timeout_s, tracebacks = connection.recv()
    copies = ForkedChildren(connection)
    try:
        with copies.guard_user_code():
            loaded = _load_functions(functions, key)
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
class _LoadedFunction:
    call: Callable[[Any], Any]
    name: str
    weight: float
    path: Path | None  # for errors; None: of a script
    is_async: bool
    sources: Collection[str] | None
    warm_up: Callable[[], None] | None = None  # does the slow work of a first call


def _load_functions(functions: list[RewardFunction], key: str) -> list[_LoadedFunction]:
    """Import the functions. A file with several of them is imported once. Raises ConfigError with all problems."""
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
            elif isinstance(source.code, str):
                file, _, name = source.code.rpartition(":")
                if file not in modules:
                    modules[file] = load_module(file, key)
                function, path = get_user_function(modules[file], name, file, key), Path(os.path.realpath(file))
            else:
                name, function = source.code.spec, source.code.reward()
                path = _file_of(function)
            with contextlib.suppress(ValueError):  # some callables have no signature to inspect
                inspect.signature(function).bind(None)
            how = (source.name, source.weight, path, is_async(function), source.sources, warm_up)
            loaded.append(_LoadedFunction(function, *how))
        except ArenoError as error:
            problems += error.problems
        except TypeError as error:
            problems.append(Problem(key, f"{name}(record) cannot be called: {error}"))
    if problems:
        raise ConfigError(problems)
    return loaded


def _file_of(function: Callable[[Any], Any]) -> Path:
    return Path(inspect.getfile(function.func if isinstance(function, partial) else function))


@dataclass
class _Scorer:
    """Calls the reward functions for chunks of records, and sends the answers.

    If a function is async, the time limit of a record is enforced here, otherwise by the driver.
    """

    connection: Connection
    functions: list[_LoadedFunction]
    timeout_s: float
    copies: ForkedChildren
    tracebacks: bool

    def __post_init__(self) -> None:
        self.is_async = any(function.is_async for function in self.functions)

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        return new_event_loop(self.copies.exit_if_child)

    def score(self, chunk: Chunk) -> None:
        """Send an answer for each record as soon as it is scored. Async functions score concurrently."""
        if self.is_async:
            self.loop.run_until_complete(self._score_together(chunk))
            return
        for position, payload in chunk:
            try:
                record = pickle.loads(payload)
                functions = self._functions_for(record)
                with self.copies.guard_user_code():
                    results = [self._awaited(function.call(record)) for function in functions]
                answer = _combine_results(functions, results)
            except BaseException as error:
                answer = self._answer_of_exception(error)
            self._send(position, answer)

    def _send(self, position: int, answer: RewardReply) -> None:
        """Send an answer as a plain tuple. `connection.send` with an Answer would take twice as long."""
        self.connection.send_bytes(pickle.dumps((position, tuple(answer)), pickle.HIGHEST_PROTOCOL))

    def _awaited(self, result: Any) -> Any:
        """Return the result of a function. If it is awaitable, wait for its value."""
        return self.loop.run_until_complete(result) if inspect.isawaitable(result) else result

    async def _score_together(self, chunk: Chunk) -> None:
        import asyncio

        async def call(payload: bytes) -> RewardReply:
            record = pickle.loads(payload)
            functions = self._functions_for(record)
            with self.copies.guard_user_code():
                # Plain functions come first, so that no coroutine is left unawaited if a plain function raises.
                in_order = sorted(functions, key=lambda function: function.is_async)
                results = {function.name: function.call(record) for function in in_order}
                waiting = {name: result for name, result in results.items() if inspect.isawaitable(result)}
                if len(waiting) == 1:
                    [(name, result)] = waiting.items()
                    results[name] = await result
                else:
                    results |= dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
                return _combine_results(functions, [results[function.name] for function in functions])

        async def score_one(position: int, payload: bytes) -> None:
            try:
                task = asyncio.ensure_future(call(payload))
                done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
                if not done:
                    task.cancel()
                    raise TimeoutError(f"no answer within {self.timeout_s:g} s (reward.timeout_s)")
                answer = task.result()
            except BaseException as error:
                answer = self._answer_of_exception(error)
            self._send(position, answer)

        await asyncio.gather(*(score_one(position, payload) for position, payload in chunk))

    def _functions_for(self, record: Any) -> list[_LoadedFunction]:
        return [each for each in self.functions if each.sources is None or record.source in each.sources]

    def _answer_of_exception(self, error: BaseException) -> RewardReply:
        if isinstance(error, ForkReturned):
            return RewardReply("error", None, str(error))
        status = "timeout" if _is_timeout(error) else "error"
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        path = next((f.path for f in self.functions if str(f.path) in files), None)
        if self.tracebacks:
            return RewardReply(status, None, _traceback(error)[-_MAX_TRACEBACK_CHARS:])
        return RewardReply(status, None, describe_error(error, path)[:MAX_TEXT])


def _combine_results(functions: Sequence[_LoadedFunction], results: Sequence[Any]) -> RewardReply:
    return combine_results([(f.name, f.weight, result) for f, result in zip(functions, results, strict=True)])


def _is_timeout(error: BaseException) -> bool:
    """Return whether an exception is a TimeoutError, or asyncio's own class of Python 3.10."""
    of_asyncio = sys.modules.get("asyncio")
    return isinstance(error, TimeoutError) or (of_asyncio is not None and isinstance(error, of_asyncio.TimeoutError))


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error, without frames of this file and with control characters escaped."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    lines = "".join(traceback.format_exception(type(error), error, at)).rstrip().split("\n")
    return "\n".join(map(printable, lines))
