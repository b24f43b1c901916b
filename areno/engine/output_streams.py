"""Delivery of request outputs to asyncio event loops, and batching of requests that arrive at nearly the same time.

Streams deliver outputs to event loops. A thread polls the workers as long as any request is awaited, so no event loop
is blocked. Other threads may poll the engine at the same time.

RequestBatcher joins requests of concurrent agents or clients, so that one prefill computes all their prompts. On a GPU
a prefill of one prompt takes the host as long as a prefill of many. If the first request started alone, the others
would wait for a second prefill, and all later steps would have other batch sizes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from areno.errors import EngineError, WorkerLost
from areno.types import GenerationOutput, GenerationRequest


class FairLock:
    """A lock that threads get in the order of arrival."""

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
        except BaseException:  # Ctrl-C during the wait, or just before
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


class OutputQueue:
    """A queue of outputs with a single reader, which takes all outputs at once."""

    def __init__(self) -> None:
        self._items: list[GenerationOutput | Exception] = []
        self._waiter: asyncio.Future[None] | None = None

    def is_empty(self) -> bool:
        return not self._items

    def put(self, item: GenerationOutput | Exception) -> None:
        """Add an output, or an exception for the reader to raise. Call this in the event loop of the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take_all(self) -> list[GenerationOutput | Exception]:
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items = self._items, []
        return items


@dataclass(eq=False)
class Consumer:
    """The reader of one request in an event loop."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: OutputQueue = field(default_factory=OutputQueue)
    abandoned: bool = False  # nobody reads the queue any more, although the request may not be finished

    async def wait_for_outputs(self) -> list[GenerationOutput]:
        """Wait until there is an output, and return all outputs since the last call, or raise an exception."""
        items = await self.queue.take_all()
        for item in items:
            if isinstance(item, Exception):
                raise item
        return join_outputs(items)  # type: ignore[arg-type]


def join_outputs(outputs: list[GenerationOutput]) -> list[GenerationOutput]:
    """Join partial outputs of the same sample, so that a slow reader gets fewer and longer outputs.

    The output of a finished sample has the whole completion, and replaces the partial outputs before it.
    """
    if len(outputs) == 1:
        return outputs
    found: dict[int, GenerationOutput] = {}
    for output in outputs:
        before = found.get(output.sample)
        if before is not None and output.finish_reason is None:  # a finished output has the whole completion
            output = replace(
                before,
                tokens=before.tokens + output.tokens,
                logprobs=before.logprobs + output.logprobs,
                versions=before.versions + output.versions,
                top_logprobs=before.top_logprobs + output.top_logprobs,
                raw_logprobs=before.raw_logprobs + output.raw_logprobs,
            )
        found[output.sample] = output
    return list(found.values())


def _put_into_queues(items: Iterable[tuple[Consumer, GenerationOutput | Exception]]) -> None:
    """Put each item into the queue of its consumer. Runs in the event loop of the consumers."""
    for consumer, item in items:
        if not consumer.abandoned:
            consumer.queue.put(item)


_LOOK_S = 0.01  # least time between looks at a paused clock


class RunningClock:
    """Counts the seconds in which requests may be decoded. The clock is paused while the rollout phase is suspended."""

    def __init__(self) -> None:
        self._paused_s, self._since = 0.0, None
        self._is_running = threading.Event()
        self._is_running.set()

    def now(self) -> float:
        since = self._since  # read once: another thread may start the clock
        return (time.monotonic() if since is None else since) - self._paused_s

    @property
    def is_paused(self) -> bool:
        return self._since is not None

    def pause(self, at: float | None = None) -> None:
        """Pause the clock now or as of `at`, a time of time.monotonic. A second call has no effect."""
        if self._since is None:
            self._since = time.monotonic() if at is None else at
            self._is_running.clear()

    def resume(self, at: float | None = None) -> None:
        if self._since is not None:
            now = time.monotonic() if at is None else at
            self._paused_s, self._since = self._paused_s + now - self._since, None
            self._is_running.set()

    def wait(self, timeout: float) -> None:
        self._is_running.wait(timeout)


class TimeLimit:
    """Puts a TimeoutError into a consumer's queue after `limit_s` seconds of a RunningClock, unless cancelled."""

    def __init__(self, consumer: Consumer, clock: RunningClock, limit_s: float | None):
        self._consumer, self._clock, self._timer = consumer, clock, None
        if limit_s is not None:
            self._ends_at = clock.now() + limit_s
            self._start_timer()

    def _start_timer(self) -> None:
        left_s = self._ends_at - self._clock.now()
        if left_s <= 0:
            self._consumer.queue.put(TimeoutError())
        else:  # a paused clock is looked at again and again
            self._timer = self._consumer.loop.call_later(max(left_s, _LOOK_S), self._start_timer)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class OutputStreams:
    """Delivers the outputs of an engine's requests to their readers in event loops (consumers).

    A thread polls the workers while there is a consumer. `poll_once` must pass each output to `store_output`, and an
    error to `fail_all`. `lock` guards the consumers.
    """

    def __init__(self, poll_once: Callable[[], Any], lock: threading.RLock):
        self._poll_once, self._lock = poll_once, lock
        self._consumers: dict[int, Consumer] = {}  # request id -> consumer
        self._taken: dict[asyncio.AbstractEventLoop, list[tuple[Consumer, GenerationOutput | Exception]]] = {}
        self._thread: threading.Thread | None = None

    @property
    def has_consumers(self) -> bool:
        """Return whether any request with a consumer is unfinished, even if the consumer is abandoned."""
        return bool(self._consumers)

    @property
    def has_reading_consumers(self) -> bool:
        with self._lock:
            return any(not consumer.abandoned for consumer in self._consumers.values())

    def open(self, request_id: int, consumer: Consumer) -> None:
        """Send the outputs of a request to a consumer from now on, and start the polling thread if none runs."""
        with self._lock:
            self._consumers[request_id] = consumer
            if self._thread is None:
                # A script may end without closing the engine. Python must not shut down while the thread is in torch.
                atexit.register(self.end, EngineError("the script has ended"))
                self._thread = threading.Thread(target=self._poll, daemon=True, name="areno-streams")
                self._thread.start()

    def abandon(self, consumer: Consumer) -> bool:
        """Mark a consumer as no longer read, and return whether its request is unfinished."""
        with self._lock:
            consumer.abandoned = True
            return consumer in self._consumers.values()  # not by id: a later request may have the same id

    def store_output(self, output: GenerationOutput, is_last: bool) -> bool:
        """Store an output until `deliver_stored`. Returns False if its request has no consumer. Needs the lock."""
        consumer = self._consumers.get(output.request_id)
        if consumer is None:
            return False
        if is_last:
            del self._consumers[output.request_id]
        self._taken.setdefault(consumer.loop, []).append((consumer, output))
        return True

    def deliver_stored(self) -> None:
        """Deliver the stored outputs, waking each event loop once. The caller must hold the lock."""
        taken, self._taken = self._taken, {}
        for loop, items in taken.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so its consumers are gone
                loop.call_soon_threadsafe(_put_into_queues, items)

    def fail_all(self, error: Exception) -> None:
        """Raise an error in every consumer when it is next read, and forget the consumers."""
        with self._lock:
            for consumer in self._consumers.values():
                self._taken.setdefault(consumer.loop, []).append((consumer, error))
            self._consumers.clear()
            self.deliver_stored()

    def end(self, error: Exception) -> None:
        """Call `fail_all`, and wait until the polling thread has ended."""
        self.fail_all(error)
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
_BURSTS_OF_ONE = 2  # in a row, after which requests are expected to come alone

_Stream = tuple[GenerationRequest, Consumer]


@dataclass(slots=True)
class _SingleRequests:
    """The number of successive bursts of one request, and when a request was last submitted without waiting."""

    n_bursts: int = 0
    submitted_at: float = -math.inf


class RequestBatcher:
    """Holds requests back for some milliseconds while the workers are idle, so that they are submitted together.

    Requests of one event loop that are submitted together are called a burst. A single client makes bursts of one
    request. So after two such bursts, requests of this event loop are submitted at once, until two of them arrive
    within 50 ms. While the workers are busy, requests are always submitted at once. The function `submit` must submit
    all requests or, if it raises, none. `waits` is False on a CPU, where batching saves no time.
    """

    def __init__(self, submit: Callable[[Sequence[_Stream]], None], is_idle: Callable[[], bool], waits: bool = True):
        self._submit, self._is_idle, self.waits = submit, is_idle, waits
        self._pending: dict[asyncio.AbstractEventLoop, _PendingBatch] = {}
        self._expected: Counter[asyncio.AbstractEventLoop] = Counter()
        # Weak keys, because an announced number stays if no burst follows, and would keep the loop alive.
        self._announced = WeakKeyDictionary[asyncio.AbstractEventLoop, int]()
        self._alone = WeakKeyDictionary[asyncio.AbstractEventLoop, _SingleRequests]()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Let held requests wait longer, at most 50 ms, because this event loop is about to submit another."""
        loop = asyncio.get_running_loop()
        self._expected[loop] += 1
        try:
            yield
        finally:
            self._expected[loop] -= 1
            if not self._expected[loop]:
                del self._expected[loop]

    def announce(self, n_requests: int) -> None:
        """Submit held requests of this event loop as soon as `n_requests` of them are held."""
        self._announced[asyncio.get_running_loop()] = n_requests

    async def submit(self, request: GenerationRequest, consumer: Consumer) -> None:
        """Submit a request, perhaps some milliseconds later together with others.

        If the caller is cancelled during the wait, the request may or may not have been submitted. Raises EngineError
        if the request cannot be served.
        """
        loop = asyncio.get_running_loop()
        burst = self._pending.get(loop)
        if burst is None:
            if not self.waits or not self._should_wait(loop):
                return self._submit([(request, consumer)])
            burst = self._pending[loop] = _PendingBatch(loop, self._submit_all, lambda: loop in self._expected)
        submitted = burst.add((request, consumer))
        if len(burst.waiting) == self._announced.get(loop):
            burst.submit()
        await submitted

    def _should_wait(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether a new request should wait for others. Also updates the record of single requests."""
        alone, now = self._alone.setdefault(loop, _SingleRequests()), loop.time()
        if not self._is_idle():
            if now < alone.submitted_at + _MOST_S:  # the request before did not come alone
                alone.n_bursts = 0
            return False
        if alone.n_bursts < _BURSTS_OF_ONE or loop in self._expected or loop in self._announced:
            return True
        alone.submitted_at = now
        return False

    def _submit_all(self, burst: _PendingBatch) -> None:
        del self._pending[burst.loop]
        self._announced.pop(burst.loop, None)
        alone = self._alone[burst.loop]
        alone.n_bursts = alone.n_bursts + 1 if len(burst.waiting) == 1 else 0
        waiting = [(stream, future) for stream, future in burst.waiting if not future.done()]  # not cancelled
        if not waiting:
            return None
        try:
            self._submit([stream for stream, _ in waiting])
        except EngineError as error:
            if isinstance(error, WorkerLost) or len(waiting) == 1:
                return _settle_futures(waiting, error)
            for stream, future in waiting:  # one request was refused, so none was submitted
                _settle_futures([(stream, future)], self._submit_alone(stream))
        except Exception as error:
            _settle_futures(waiting, error)
        else:
            _settle_futures(waiting, None)

    def _submit_alone(self, stream: _Stream) -> Exception | None:
        try:
            self._submit([stream])
        except Exception as error:
            return error
        return None


class _PendingBatch:
    """Requests of one event loop that wait to be submitted together.

    They are submitted when no request has arrived for 3 ms and `expects_more` returns False, but at the latest 50 ms
    after the first request. `done` is called once, to submit them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[_PendingBatch], None], expects_more: Callable[[], bool]
    ):
        self.loop, self._done, self._expects_more = loop, done, expects_more
        self.waiting: list[tuple[_Stream, asyncio.Future[None]]] = []
        self._first_at = self._last_at = loop.time()
        self._has_ended = False
        self._start_timer()

    def add(self, stream: _Stream) -> asyncio.Future[None]:
        self._last_at = self.loop.time()
        future: asyncio.Future[None] = self.loop.create_future()
        self.waiting.append((stream, future))
        return future

    def submit(self) -> None:
        self._timer.cancel()
        self._has_ended = True
        self._done(self)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_at(self._last_at + PAUSE_S, self._check_after_reads)

    def _check_after_reads(self) -> None:
        # A busy loop may hold requests that it has not read yet. They come first: one round of the loop reads them, and
        # the next round runs their handlers.
        self.loop.call_soon(lambda: self.loop.call_soon(self._submit_if_complete))

    def _submit_if_complete(self) -> None:
        if self._has_ended:
            return
        now = self.loop.time()
        if self._expects_more():
            self._last_at = now
        if now < min(self._last_at + PAUSE_S, self._first_at + _MOST_S):
            self._start_timer()
        else:
            self.submit()


def _settle_futures(waiting: Sequence[tuple[_Stream, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, future in waiting:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
