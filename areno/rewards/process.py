"""The reward process's half of scoring: imports the user's function and calls it for the records that it is sent.

areno.rewards.pool talks to this process, and its keeper (areno.rewards.keeper) ends it together with all that the
function started. Nothing large is imported here, so that it starts quickly.

Messages are pickled over one socket. In: (file:function or a pickled function, key, timeout_s) once, then chunks
[(position, pickled record), ...]. Out: ("ready", is_async) or ("failed", Problems) once, then (position, status, value,
message) for each record, as soon as it is scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, ConfigError, Problem
from areno.files.user_code import describe_error, load_function, split_spec

Chunk = list[tuple[int, bytes]]
Answer = tuple[str, float | None, str]  # status, value, message

DEFAULT_FUNCTION = "reward_fn"
_LARGEST = 3.4028234663852886e38  # of float32, which training computes with
_COPY_LIMIT_S = 0.2  # so long is waited for copies of this process to come back


def main(fd: int) -> None:
    """Serve until the driver closes the socket."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the driver handles Ctrl-C
    os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # this process may end at any moment
    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        _serve(connection)
    os._exit(0)


def _serve(connection: Connection) -> None:
    spec, key, timeout_s = connection.recv()
    copies = _Copies(connection)
    name, path = DEFAULT_FUNCTION, None
    try:
        with copies.stay_inside():
            if isinstance(spec, bytes):
                function = _unpickle(spec, key)
            else:
                file, name = split_spec(spec, DEFAULT_FUNCTION)
                path = Path(file)
                function = load_function(file, name, key)
        inspect.signature(function).bind(None)
    except ArenoError as error:
        # By their texts: what a user's file raises may hold anything.
        connection.send(("failed", [Problem(problem.key, problem.message) for problem in error.problems]))
        return
    except _CameBack as error:
        connection.send(("failed", [Problem(key, f"{name}: importing it {error}")]))
        return
    except TypeError as error:
        connection.send(("failed", [Problem(key, f"{name}(record) cannot be called: {error}")]))
        return
    except ValueError:
        pass  # some callables have no signature to look at
    scorer = _Scorer(connection, function, path, timeout_s, copies)
    connection.send(("ready", scorer.is_async))
    while True:
        scorer.score(connection.recv())


def _unpickle(data: bytes, key: str) -> Callable[..., Any]:
    try:
        return pickle.loads(data)
    except (Exception, SystemExit) as error:  # it imports the module of the function, which may raise anything
        text = f"the function given as reward_fn does not load: {describe_error(error)}"
        raise ConfigError(Problem(key, text)) from error


@dataclass
class _Scorer:
    """Calls the function and sends its answers."""

    connection: Connection
    function: Callable[..., Any]
    path: Path | None
    timeout_s: float
    copies: _Copies

    def __post_init__(self) -> None:
        call = getattr(self.function, "__call__", None)  # noqa: B004  # that of an object may be async
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        self.loop = asyncio.new_event_loop()

    def score(self, chunk: Chunk) -> None:
        """Score the records of a chunk one after another, or all at once if the function is async."""
        if self.is_async:
            self.loop.run_until_complete(self._score_together(chunk))
            return
        for position, payload in chunk:
            try:
                with self.copies.stay_inside():
                    result = self.function(pickle.loads(payload))
                    if inspect.isawaitable(result):
                        result = self.loop.run_until_complete(result)
                answer = _verdict(result)
            except BaseException as error:
                answer = self._failure(error)
            self.connection.send((position, *answer))

    async def _score_together(self, chunk: Chunk) -> None:
        async def call(payload: bytes) -> Any:
            with self.copies.stay_inside():
                return await self.function(pickle.loads(payload))

        async def one(position: int, payload: bytes) -> None:
            try:
                task = asyncio.ensure_future(call(payload))
                done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
                if not done:
                    task.cancel()
                    raise TimeoutError(f"no answer within {self.timeout_s:g} s (reward.timeout_s)")
                answer = _verdict(task.result())
            except BaseException as error:
                answer = self._failure(error)
            self.connection.send((position, *answer))

        await asyncio.gather(*(one(position, payload) for position, payload in chunk))

    def _failure(self, error: BaseException) -> Answer:
        if isinstance(error, _CameBack):
            return "error", None, str(error)
        status = "timeout" if isinstance(error, TimeoutError | asyncio.TimeoutError) else "error"
        try:
            message = describe_error(error, self.path)
        except Exception:  # an error whose __str__ raises
            message = type(error).__name__
        return status, None, message[:500]


def _verdict(result: Any) -> Answer:
    """The answer for what the function returned, which must be a number that training can compute with."""
    try:
        if not hasattr(result, "__float__"):
            return "error", None, f"returned {repr(result)[:40]} ({type(result).__name__}); a reward is a number"
        value = float(result)
    except Exception as error:  # __float__ may raise anything
        return "error", None, (str(error) or type(error).__name__)[:500]
    problem = reward_problem(value)
    return ("not_finite", None, f"returned {problem}") if problem else ("ok", value, "")


def reward_problem(value: float) -> str:
    """What is wrong with a number as a reward; "" if nothing is."""
    if not math.isfinite(value):
        return f"{value}; a reward is a finite number"
    return f"{value:g}; a reward is at most {_LARGEST:.2g} (float32)" if abs(value) > _LARGEST else ""


class _CameBack(Exception):
    """The user's code forked, and the copy of this process came out of it, too."""


class _Copies:
    """Copies of this process that the user's code makes by a fork. They must not answer: they share the connection.

    A copy that comes out of the user's code ends there. It says so through a pipe, which every copy holds open until it
    ends or becomes another program.
    """

    def __init__(self, connection: Connection):
        self._original = os.getpid()
        self._pipe: tuple[int, int] | None = None
        os.register_at_fork(before=self._open, after_in_child=connection.close)

    def _open(self) -> None:
        if self._pipe is None:
            self._pipe = os.pipe()

    @contextlib.contextmanager
    def stay_inside(self) -> Iterator[None]:
        """Around the user's code. Raises _CameBack, in place of what the code returned or raised, if a copy left it."""
        self._end_copy()
        try:
            yield
        except SystemExit:
            if os.getpid() != self._original:
                os._exit(0)  # a proper end of a copy
            raise
        finally:
            self._end_copy()
            if self._pipe is not None and self._told():
                raise _CameBack("forked, and the forked process returned too; end it with os._exit()")

    def _end_copy(self) -> None:
        if os.getpid() != self._original:
            if self._pipe is not None:
                with contextlib.suppress(OSError):  # nobody listens any more
                    os.write(self._pipe[1], b".")
            os._exit(0)

    def _told(self) -> bool:
        """Whether a copy has come out since the first fork; those that are still inside are not waited for."""
        assert self._pipe is not None
        reader, writer = self._pipe
        self._pipe = None
        os.close(writer)
        told = wait([reader], _COPY_LIMIT_S) and os.read(reader, 1)
        os.close(reader)
        return bool(told)
