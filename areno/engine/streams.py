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
from areno.types import GenerationOutput, GenerationRequest


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


@dataclass
class _Consumer:
    """One request that is awaited in an event loop."""

    unfinished: int  # samples
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: asyncio.Queue[GenerationOutput | Exception] = field(default_factory=asyncio.Queue)
    abandoned: bool = False  # nobody reads the queue any more, but the workers still have to end the request

    def put(self, item: GenerationOutput | Exception) -> None:
        if not self.abandoned:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its consumer with it
                self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class Streams:
    """The consumers of one engine. `poll_once` makes the engine poll its workers, which calls `take` and `fail`."""

    def __init__(self, poll_once: Callable[[], Any]):
        self._poll_once = poll_once
        self._lock = threading.Lock()
        self._consumers: dict[int, _Consumer] = {}  # request id -> consumer
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

    def open(self, request: GenerationRequest) -> asyncio.Queue[GenerationOutput | Exception]:
        """Where the outputs of a request will arrive, in the running event loop; an Exception ends them."""
        consumer = _Consumer(request.n_samples)
        with self._lock:
            self._consumers[request.request_id] = consumer
            if self._thread is None:
                # A script may end without closing the engine. Python must not shut down while the thread is in torch.
                atexit.register(self._at_exit)
                self._thread = threading.Thread(target=self._poll, daemon=True, name="areno-streams")
                self._thread.start()
        return consumer.queue

    def abandon(self, request_id: int, outputs: asyncio.Queue[GenerationOutput | Exception]) -> bool:
        """Nobody reads this queue of `open` any more. Whether the workers still work on its request.

        A later request may have taken the id over, and goes on.
        """
        with self._lock:
            consumer = self._consumers.get(request_id)
            if consumer is None or consumer.queue is not outputs:
                return False
            consumer.abandoned = True
            return True

    def take(self, output: GenerationOutput) -> bool:
        """Hand an output to its consumer. False where it has none."""
        with self._lock:
            consumer = self._consumers.get(output.request_id)
            if consumer is None:
                return False
            if output.finish_reason is not None:
                consumer.unfinished -= 1
                if not consumer.unfinished:
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
        thread = self._thread
        if thread is not None:
            thread.join()

    def _at_exit(self) -> None:
        self.end(EngineError("the script has ended"))

    def _poll(self) -> None:
        while True:
            with self._lock:
                if not self._consumers:
                    self._thread = None
                    atexit.unregister(self._at_exit)
                    return
            self._poll_once()
