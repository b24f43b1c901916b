"""Outputs of requests for asyncio: who awaits them never blocks the event loop.

A thread polls the workers as long as there is a consumer, beside whoever else polls the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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
        with self._guard:
            self._arrivals.append(turn)
            self._arrivals[0].set()
        try:
            turn.wait()
        except BaseException:  # Ctrl-C amid the wait
            self._give_up(turn)
            raise

    def __exit__(self, *exc: object) -> None:
        self._give_up(self._arrivals[0])

    def _give_up(self, turn: threading.Event) -> None:
        with self._guard:
            self._arrivals.remove(turn)
            if self._arrivals:
                self._arrivals[0].set()


@dataclass(eq=False)
class Consumer:
    """One request that is awaited in an event loop."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: asyncio.Queue[GenerationOutput | Exception] = field(default_factory=asyncio.Queue)
    abandoned: bool = False  # nobody reads the queue any more, but the workers still have to end the request

    def put(self, item: GenerationOutput | Exception) -> None:
        if not self.abandoned:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its consumer with it
                self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class Streams:
    """The consumers of one engine, guarded by its `lock`.

    `poll_once` makes the engine poll its workers, which calls `take` and `fail`.
    """

    def __init__(self, poll_once: Callable[[], Any], lock: threading.RLock):
        self._poll_once, self._lock = poll_once, lock
        self._consumers: dict[int, Consumer] = {}  # request id -> consumer
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

    def open(self, request_id: int) -> Consumer:
        """Whose queue the outputs of a request will come to, in the running event loop; an Exception ends them."""
        consumer = Consumer()
        with self._lock:
            self._consumers[request_id] = consumer
            if self._thread is None:
                # A script may end without closing the engine. Python must not shut down while the thread is in torch.
                atexit.register(self.end, EngineError("the script has ended"))
                self._thread = threading.Thread(target=self._poll, daemon=True, name="areno-streams")
                self._thread.start()
        return consumer

    def abandon(self, consumer: Consumer) -> bool:
        """Nobody reads its queue any more. Whether the workers still work on its request."""
        with self._lock:
            consumer.abandoned = True
            return consumer in self._consumers.values()  # a later request may have taken the id over

    def take(self, output: GenerationOutput, is_last: bool) -> bool:
        """Hand an output to the consumer of its request; False where it has none. Called with the lock held."""
        consumer = self._consumers.get(output.request_id)
        if consumer is None:
            return False
        if is_last:
            del self._consumers[output.request_id]
        consumer.put(output)
        return True

    def fail(self, error: Exception) -> None:
        """Raise an error in every consumer and forget them."""
        with self._lock:
            consumers = list(self._consumers.values())
            self._consumers.clear()
        for consumer in consumers:
            consumer.put(error)

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
