"""Waiting for what another thread or process does, as long as a busy machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    what: Callable[[], object], seconds: float = 200.0, *, pause_s: float = 0.005, found: Callable[[], object] = str
) -> None:
    """Return as soon as something holds. Fails where it does not after so long, with what is `found` instead.

    pause_s: between two looks, for those that take long.
    """
    ends_at = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends_at, f"not within {seconds:.0f} s: {found()}"
        time.sleep(pause_s)
