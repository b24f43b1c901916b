"""Requests that follow each other closely, gathered so that one prefill computes all of their prompts.

Agents and clients that are served at the same time ask at the same time, but their requests arrive one by one. A
prefill of one prompt takes a GPU's host as long as one of many. So if the first request began alone, the others would
wait for a second prefill, and all later steps would have batches of other sizes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from areno.engine.requests.streams import Consumer
from areno.errors import EngineError, WorkerLost
from areno.types import GenerationRequest

_PAUSE_S = 0.003  # after the last request: a client takes about two for the next one
_MOST_S = 0.05  # after the first one: about two prefills

_Stream = tuple[GenerationRequest, Consumer]


class Gathering:
    """Between requests and the workers. While the workers have something to do, nothing is held back.

    submit: submits requests with their consumers, or raises and has submitted none. is_idle: whether the workers have
    no request. holds: false where a prefill takes as long as its tokens do, as on a CPU: then a request begins at once.
    Any event loop may use it; each gathers its own.
    """

    def __init__(self, submit: Callable[[Sequence[_Stream]], None], is_idle: Callable[[], bool], holds: bool = True):
        self._submit, self._is_idle, self.holds = submit, is_idle, holds
        self._bursts: dict[asyncio.AbstractEventLoop, _Burst] = {}
        self._expected: Counter[asyncio.AbstractEventLoop] = Counter()
        # Where nothing is held back, or nobody asks, the number stays: not so the loop.
        self._announced = WeakKeyDictionary[asyncio.AbstractEventLoop, int]()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Around what comes before a request of this event loop. The others of its burst wait for it."""
        loop = asyncio.get_running_loop()
        self._expected[loop] += 1
        try:
            yield
        finally:
            self._expected[loop] -= 1
            if not self._expected[loop]:
                del self._expected[loop]

    def announce(self, n_requests: int) -> None:
        """So many requests of this event loop are about to come. When a burst has them all, it waits for no other."""
        self._announced[asyncio.get_running_loop()] = n_requests

    async def submit(self, request: GenerationRequest, consumer: Consumer) -> None:
        """Submit a request, perhaps some milliseconds later. Raises what the engine raises for it.

        Where the caller is cancelled meanwhile, the request may have been submitted or not.
        """
        loop = asyncio.get_running_loop()
        burst = self._bursts.get(loop)
        if burst is None:
            if not self.holds or not self._is_idle():
                return self._submit([(request, consumer)])
            burst = self._bursts[loop] = _Burst(loop, self._submit_all, lambda: loop in self._expected)
        submitted = burst.add((request, consumer))
        if len(burst.waiting) == self._announced.get(loop):
            burst.end()
        await submitted

    def _submit_all(self, burst: _Burst) -> None:
        del self._bursts[burst.loop]
        self._announced.pop(burst.loop, None)
        waiting = [(stream, future) for stream, future in burst.waiting if not future.done()]  # others were cancelled
        if not waiting:
            return None
        try:
            self._submit([stream for stream, _ in waiting])
        except EngineError as error:
            if isinstance(error, WorkerLost) or len(waiting) == 1:
                return _answer(waiting, error)
            for stream, future in waiting:  # one of them was refused, and with it all
                _answer([(stream, future)], self._error_of(stream))
        except Exception as error:
            _answer(waiting, error)
        else:
            _answer(waiting, None)

    def _error_of(self, stream: _Stream) -> Exception | None:
        try:
            self._submit([stream])
        except Exception as error:
            return error
        return None


class _Burst:
    """Requests of one event loop. done: called once, when no other has followed for a moment and none is expected."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[_Burst], None], expects_more: Callable[[], bool]
    ):
        self.loop, self._done, self._expects_more = loop, done, expects_more
        self.waiting: list[tuple[_Stream, asyncio.Future[None]]] = []
        self._first_at = self._last_at = loop.time()
        self._has_ended = False
        self._wait()

    def add(self, stream: _Stream) -> asyncio.Future[None]:
        """Done when the request was submitted."""
        self._last_at = self.loop.time()
        future: asyncio.Future[None] = self.loop.create_future()
        self.waiting.append((stream, future))
        return future

    def end(self) -> None:
        """Nobody else is waited for."""
        self._timer.cancel()
        self._has_ended = True
        self._done(self)

    def _wait(self) -> None:
        self._timer = self.loop.call_at(self._last_at + _PAUSE_S, self._read_first)

    def _read_first(self) -> None:
        # When the time is over, a busy loop may have requests that nobody has looked at. They come first: one round
        # reads them, and the next one runs their handlers.
        self.loop.call_soon(lambda: self.loop.call_soon(self._look))

    def _look(self) -> None:
        if self._has_ended:
            return
        now = self.loop.time()
        if self._expects_more():
            self._last_at = now
        if now < min(self._last_at + _PAUSE_S, self._first_at + _MOST_S):
            self._wait()
        else:
            self.end()


def _answer(waiting: Sequence[tuple[_Stream, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, future in waiting:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
