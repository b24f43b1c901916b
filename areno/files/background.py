"""One piece of work at a time in a thread, whose error comes to whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Background:
    """Work beside other work. name: of the thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._work: Future[Any] | None = None

    def start(self, work: Callable[..., object], *args: Any) -> None:
        """Begin, when what was begun before has ended. Raises as `settle` does."""
        self.settle()
        self._work = self._thread.submit(work, *args)

    def settle(self) -> None:
        """Wait for the end of what was begun. Raises, once, what it has raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """The same, for good."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
