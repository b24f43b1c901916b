"""Outputs of requests for asyncio: who awaits them never blocks the event loop.

A thread polls the workers as long as there is a consumer, beside whoever else polls the engine.

Requests that follow each other closely, gathered so that one prefill computes all of their prompts.

Agents and clients that are served at the same time ask at the same time, but their requests arrive one by one. A
prefill of one prompt takes a GPU's host as long as one of many. So if the first request began alone, the others would
wait for a second prefill, and all later steps would have batches of other sizes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from areno.errors import EngineError, WorkerLost
from areno.types import GenerationOutput, GenerationRequest


class FairLock:
    """A lock that is given in the order of arrival. threading.Lock may serve the same busy thread again and again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._arrivals: deque[threading.Event] = deque()  # the first one holds the lock

    def __enter__(self) -> None:
        turn = threading.Event()
        try:
            with self._guard:
                self._arrivals.append(turn)
                self._arrivals[0].set()
            turn.wait()
        except BaseException:  # Ctrl-C amid the wait, or just before
            self._give_up(turn)
            raise

    def __exit__(self, *exc: object) -> None:
        self._give_up(self._arrivals[0])

    def _give_up(self, turn: threading.Event) -> None:
        with self._guard:
            if turn in self._arrivals:
                self._arrivals.remove(turn)
            if self._arrivals:
                self._arrivals[0].set()


@dataclass(eq=False)
class Consumer:
    """One request that is awaited in an event loop."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: asyncio.Queue[GenerationOutput | Exception] = field(default_factory=asyncio.Queue)
    abandoned: bool = False  # nobody reads the queue any more, but the workers still have to end the request

    async def next(self) -> list[GenerationOutput]:
        """Return the outputs since the last call, at least one. Raise an exception that has arrived."""
        items = [await self.queue.get()]
        while not self.queue.empty():
            items.append(self.queue.get_nowait())
        for item in items:
            if isinstance(item, Exception):
                raise item
        return joined(items)  # type: ignore[arg-type]


def joined(outputs: list[GenerationOutput]) -> list[GenerationOutput]:
    """Join partial outputs of the same sample, so that a slow reader gets longer ones."""
    if len(outputs) == 1:
        return outputs
    found: dict[int, GenerationOutput] = {}
    for output in outputs:
        before = found.get(output.sample)
        if before is not None and output.finish_reason is None:  # a finished one has the whole completion
            output = replace(
                before,
                tokens=before.tokens + output.tokens,
                logprobs=before.logprobs + output.logprobs,
                versions=before.versions + output.versions,
                top_logprobs=before.top_logprobs + output.top_logprobs,
            )
        found[output.sample] = output
    return list(found.values())


def _put(items: Iterable[tuple[Consumer, GenerationOutput | Exception]]) -> None:
    """Give each consumer its item. Called in their event loop."""
    for consumer, item in items:
        if not consumer.abandoned:
            consumer.queue.put_nowait(item)


class Streams:
    """The consumers of one engine, guarded by its `lock`.

    `poll_once` makes the engine poll its workers, which calls `take` and `fail`.
    """

    def __init__(self, poll_once: Callable[[], Any], lock: threading.RLock):
        self._poll_once, self._lock = poll_once, lock
        self._consumers: dict[int, Consumer] = {}  # request id -> consumer
        self._taken: dict[asyncio.AbstractEventLoop, list[tuple[Consumer, GenerationOutput | Exception]]] = {}
        self._thread: threading.Thread | None = None

    @property
    def are_open(self) -> bool:
        """Whether there is a request that somebody awaits, or awaited when it was aborted."""
        return bool(self._consumers)

    @property
    def are_read(self) -> bool:
        """Whether a request has a reader."""
        with self._lock:
            return any(not consumer.abandoned for consumer in self._consumers.values())

    def open(self, request_id: int, consumer: Consumer) -> None:
        """Send the outputs of a request to the queue of a consumer. An exception ends them."""
        with self._lock:
            self._consumers[request_id] = consumer
            if self._thread is None:
                # A script may end without closing the engine. Python must not shut down while the thread is in torch.
                atexit.register(self.end, EngineError("the script has ended"))
                self._thread = threading.Thread(target=self._poll, daemon=True, name="areno-streams")
                self._thread.start()

    def abandon(self, consumer: Consumer) -> bool:
        """Nobody reads its queue any more. Whether the workers still work on its request."""
        with self._lock:
            consumer.abandoned = True
            return consumer in self._consumers.values()  # a later request may have taken the id over

    def take(self, output: GenerationOutput, is_last: bool) -> bool:
        """Keep an output for the consumer of its request; False where it has none. Called with the lock held."""
        consumer = self._consumers.get(output.request_id)
        if consumer is None:
            return False
        if is_last:
            del self._consumers[output.request_id]
        self._taken.setdefault(consumer.loop, []).append((consumer, output))
        return True

    def deliver_taken(self) -> None:
        """Give out what was taken, waking each event loop once. Called with the lock held."""
        taken, self._taken = self._taken, {}
        for loop, items in taken.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its consumers with it
                loop.call_soon_threadsafe(_put, items)

    def fail(self, error: Exception) -> None:
        """Raise an error in every consumer and forget them."""
        with self._lock:
            for consumer in self._consumers.values():
                self._taken.setdefault(consumer.loop, []).append((consumer, error))
            self._consumers.clear()
            self.deliver_taken()

    def end(self, error: Exception) -> None:
        """Raise an error in every consumer, and return when no thread polls any more."""
        self.fail(error)
        if (thread := self._thread) is not None:
            thread.join()

    def _poll(self) -> None:
        while True:
            with self._lock:
                if not self._consumers:
                    self._thread = None
                    atexit.unregister(self.end)
                    return
            self._poll_once()


PAUSE_S = 0.003  # after the last request: a client takes about two for the next one
_MOST_S = 0.05  # after the first one: about two prefills

_Stream = tuple[GenerationRequest, Consumer]


class RequestBatcher:
    """Submits requests that arrive together as one batch. While the workers are busy, requests are submitted at once.

    submit: submits requests with their consumers, or raises and has submitted none. is_idle: whether the workers have
    no request. waits: false where a prefill takes as long as its tokens do, as on a CPU: then a request begins at once.
    Any event loop may use it; each gathers its own.
    """

    def __init__(self, submit: Callable[[Sequence[_Stream]], None], is_idle: Callable[[], bool], waits: bool = True):
        self._submit, self._is_idle, self.waits = submit, is_idle, waits
        self._pending: dict[asyncio.AbstractEventLoop, _PendingBatch] = {}
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
        burst = self._pending.get(loop)
        if burst is None:
            if not self.waits or not self._is_idle():
                return self._submit([(request, consumer)])
            burst = self._pending[loop] = _PendingBatch(loop, self._submit_all, lambda: loop in self._expected)
        submitted = burst.add((request, consumer))
        if len(burst.waiting) == self._announced.get(loop):
            burst.end()
        await submitted

    def _submit_all(self, burst: _PendingBatch) -> None:
        del self._pending[burst.loop]
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


class _PendingBatch:
    """Requests of one event loop. done: called once, when no other has followed for a moment and none is expected."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[_PendingBatch], None], expects_more: Callable[[], bool]
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
        self._timer = self.loop.call_at(self._last_at + PAUSE_S, self._read_first)

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
        if now < min(self._last_at + PAUSE_S, self._first_at + _MOST_S):
            self._wait()
        else:
            self.end()


def _answer(waiting: Sequence[tuple[_Stream, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, future in waiting:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
