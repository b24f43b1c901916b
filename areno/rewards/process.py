"""The reward process's half of scoring: imports the user's function and calls it for the records that it is sent.

areno.rewards.pool starts this process and talks to it. Nothing large is imported here, so that it starts quickly.

Messages are pickled over one socket. In: (file:function or a pickled function, key, timeout_s) once, then chunks
[(position, pickled record), ...]. Out: ("ready", is_async) or ("failed", Problems) once, then (position, status, value,
message) for each record, as soon as it is scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, ConfigError, Problem
from areno.files.user_code import describe_error, load_function, split_spec

Chunk = list[tuple[int, bytes]]
Answer = tuple[str, float | None, str]  # status, value, message

# The driver kills a process that exceeds its limits. The process ends itself this much later, if the driver is gone.
_SPARE_S = 5.0
# An import may compile or download something, but a hang must end.
IMPORT_LIMIT_S = 180.0
DEFAULT_FUNCTION = "reward_fn"


def main(fd: int, driver_pid: int) -> None:
    """Serve until the driver closes the socket or is gone, then end together with all that the function started."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the driver handles Ctrl-C
    threading.Thread(target=_end_with_driver, args=(driver_pid,), daemon=True).start()
    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        _serve(connection)
    _kill_group()


def _serve(connection: Connection) -> None:
    spec, key, timeout_s = connection.recv()
    watchdog = _Watchdog()
    watchdog.arm(IMPORT_LIMIT_S)
    name, path = DEFAULT_FUNCTION, None
    try:
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
    except TypeError as error:
        connection.send(("failed", [Problem(key, f"{name}(record) cannot be called: {error}")]))
        return
    except ValueError:
        pass  # some callables have no signature to look at
    scorer = _Scorer(connection, function, path, timeout_s, watchdog)
    watchdog.disarm()
    connection.send(("ready", scorer.is_async))
    while True:
        scorer.score(connection.recv())
        watchdog.disarm()


def _unpickle(data: bytes, key: str) -> Callable[..., Any]:
    try:
        return pickle.loads(data)
    except Exception as error:  # it imports the module of the function, which may raise anything
        text = f"the function given as reward_fn does not load: {describe_error(error)}"
        raise ConfigError(Problem(key, text)) from error


@dataclass
class _Scorer:
    """Calls the function and sends its answers."""

    connection: Connection
    function: Callable[..., Any]
    path: Path | None
    timeout_s: float
    watchdog: _Watchdog

    def __post_init__(self) -> None:
        call = getattr(self.function, "__call__", None)  # noqa: B004  # that of an object may be async
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        self.loop = asyncio.new_event_loop()

    def score(self, chunk: Chunk) -> None:
        """Score the records of a chunk one after another, or all at once if the function is async."""
        if self.is_async:
            self.watchdog.arm(self.timeout_s + 2 * _SPARE_S)
            self.loop.run_until_complete(self._score_together(chunk))
            return
        for position, payload in chunk:
            self.watchdog.arm(self.timeout_s + _SPARE_S)
            try:
                result = self.function(pickle.loads(payload))
                if inspect.isawaitable(result):
                    result = self.loop.run_until_complete(result)
                answer = _verdict(result)
            except BaseException as error:
                answer = self._failure(error)
            self.connection.send((position, *answer))

    async def _score_together(self, chunk: Chunk) -> None:
        async def one(position: int, payload: bytes) -> None:
            try:
                task = asyncio.ensure_future(self.function(pickle.loads(payload)))
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
        status = "timeout" if isinstance(error, TimeoutError | asyncio.TimeoutError) else "error"
        try:
            message = describe_error(error, self.path)
        except Exception:  # an error whose __str__ raises
            message = type(error).__name__
        return status, None, message[:500]


def _verdict(result: Any) -> Answer:
    """The answer for what the function returned, which must be a finite number."""
    try:
        if not hasattr(result, "__float__"):
            return "error", None, f"returned {repr(result)[:40]} ({type(result).__name__}); a reward is a number"
        value = float(result)
    except Exception as error:  # __float__ may raise anything
        return "error", None, (str(error) or type(error).__name__)[:500]
    finite = math.isfinite(value)
    return ("ok", value, "") if finite else ("error", None, f"returned {value}; a reward is a finite number")


class _Watchdog:
    """Ends this process from a C thread, which runs even while the function holds the interpreter lock."""

    def __init__(self) -> None:
        self._silent = open(os.devnull, "w")  # noqa: SIM115  # stays open as long as the process
        self._armed_at = -math.inf

    def arm(self, seconds: float) -> None:
        # Arming starts a thread, which costs more than a call of a function that takes microseconds.
        now = time.monotonic()
        if now - self._armed_at > 1.0:
            self._armed_at = now
            faulthandler.dump_traceback_later(seconds + 1.0, exit=True, file=self._silent)

    def disarm(self) -> None:
        self._armed_at = -math.inf
        faulthandler.cancel_dump_traceback_later()


def _end_with_driver(driver_pid: int) -> None:
    while os.getppid() == driver_pid:
        time.sleep(0.5)
    _kill_group()


def _kill_group() -> None:
    """End this process and all that the reward function started: they are the process group that the driver made."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)
