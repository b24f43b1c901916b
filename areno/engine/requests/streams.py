"""Outputs of requests for asyncio: who awaits them never blocks the event loop.

A thread polls the workers as long as there is a consumer, beside whoever else polls the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from areno.errors import EngineError
from areno.types import GenerationOutput


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
        """What has come since the last call, at least one output. Raises an Exception that has come."""
        items = [await self.queue.get()]
        while not self.queue.empty():
            items.append(self.queue.get_nowait())
        for item in items:
            if isinstance(item, Exception):
                raise item
        return joined(items)  # type: ignore[arg-type]


def joined(outputs: list[GenerationOutput]) -> list[GenerationOutput]:
    """The same with one output for each sample: who reads slowly reads longer pieces."""
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
        """Whether there is a request that somebody awaits."""
        with self._lock:
            return any(not consumer.abandoned for consumer in self._consumers.values())

    def open(self, request_id: int, consumer: Consumer) -> None:
        """The outputs of a request will come to the queue of a consumer; an Exception ends them."""
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

    def hand_over(self) -> None:
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
            self.hand_over()

    def end(self, error: Exception) -> None:
        """The same, and return when nothing polls any more."""
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
