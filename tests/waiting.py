"""Waiting for what another thread or process does, as long as a busy machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as something holds. AssertionError where it does not after so long."""
    ends_at = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends_at, f"not within {seconds:.0f} s"
        time.sleep(0.005)
