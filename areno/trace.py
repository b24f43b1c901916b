"""The recorder of trace events of this process: what the process did, where, and from when to when.

`begin` turns the recorder on, which is off by default. Code that is worth a bar in a timeline is wrapped in `span`, or
calls `add` with times that it has measured itself. While the recorder is off, `span` and `add` do nothing. Worker
processes send their events to the driver together with the replies to its commands. The driver takes all events at the
end of each step, and areno/tracking/trace_file.py writes them.

A lane is the row of the timeline that an event belongs to, as "group/track", such as "rank 0/device". Events of such a
lane follow each other or are nested. Events of a lane "group#id", such as "samples#3.5.0", belong to one object, and
may overlap with events of other objects of the group.

All times are in nanoseconds since 1970. Each process reads the monotonic clock of the machine and adds an offset. The
offset is the same in all processes, as long as nobody sets the clock of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Event = tuple[str, str, int, int, Mapping[str, Any]]
"""(lane, name, start, end, arguments): times in nanoseconds since 1970, arguments as JSON values by name."""

Phases = tuple[tuple[str, int], ...]
"""(name, start) of each phase of a sample in the decoder, in order. The last entry is ("end", time of the end)."""

DRIVER = "driver/main"

active = False
"""Whether this process records events. Read it, but call `begin` and `end` to change it."""

_events: list[Event] = []
_OFF = nullcontext()


def _offset() -> int:
    """Return the nanoseconds to add to a reading of the monotonic clock, so that it counts from 1970."""
    found = []
    for _ in range(5):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        found.append((after - before, now - (before + after) // 2))
    return min(found)[1]


_to_1970 = _offset()


def begin() -> None:
    """Record events from now on."""
    global active
    active = True


def end() -> None:
    """Stop recording, and drop all events that have not been taken."""
    global active
    active = False
    drain_events()


def now() -> int:
    """Return the current time."""
    return time.perf_counter_ns() + _to_1970


def from_perf_counter(seconds: float) -> int:
    """Convert a reading of time.perf_counter, in seconds, to a time of events."""
    return int(seconds * 1e9) + _to_1970


def add(lane: str, name: str, start: int, end: int, **arguments: Any) -> None:
    """Record an event, if the recorder is on. Any thread may call this. Equal work has equal names."""
    if active:
        _events.append((lane, name, start, max(start, end), arguments))


def span(lane: str, name: str, **arguments: Any) -> AbstractContextManager[None]:
    """Return a context manager that records its `with` block as an event, also if the block raises an exception."""
    return _span(lane, name, arguments) if active else _OFF


@contextmanager
def _span(lane: str, name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    start = now()
    try:
        yield
    finally:
        add(lane, name, start, now(), **arguments)


def drain_events() -> list[Event]:
    """Return all events that were recorded since the last call, and forget them."""
    taken = list(_events)
    del _events[: len(taken)]  # an event that another thread has added meanwhile stays
    return taken


def extend(events: Iterable[Event]) -> None:
    """Add events that another process has recorded and drained."""
    _events.extend(events)
