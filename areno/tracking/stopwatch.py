"""How long the phases of a step take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Seconds by phase of one step, as the time/* metrics want them. A phase inside another counts as the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running = False

    def reset(self) -> None:
        """Start a new step."""
        self.seconds = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        if self._running:
            yield
            return
        self._running, started = True, time.perf_counter()
        try:
            yield
        finally:
            self._running = False
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())
