"""How long the phases of a step take."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from areno import heartbeat
from areno.errors import EngineError


class Stopwatch:
    """Seconds by phase of one step, as the time/* metrics want them. A phase inside another counts as the outer one.

    Phases are those of one thread at a time: EngineError for a second one. before_phase: called with the name of a
    phase that is about to begin.
    """

    def __init__(self, before_phase: Callable[[str], object] = lambda name: None) -> None:
        self._before_phase = before_phase
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self._running = ""
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Start a new step."""
        self.seconds, self._began = {}, time.perf_counter()

    def close_step(self) -> None:
        """Count the time since `reset` that belongs to no phase as the phase `other`."""
        self.seconds["other"] = max(0.0, time.perf_counter() - self._began - self.total)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`. The work in it must get on: see areno.heartbeat."""
        heartbeat.beat()
        if not self._lock.acquire(blocking=False):
            raise EngineError(
                f"another thread is in the phase {self._running!r} of this trainer; "
                "call a trainer from one thread at a time, and wait for a call before the next"
            )
        try:
            if self._running:
                yield
                return
            self._before_phase(name)
            self._running, started = name, time.perf_counter()
            try:
                with heartbeat.working(name):
                    yield
            finally:
                self._running = ""
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        finally:
            self._lock.release()

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())
