"""A strict reading of the Chrome trace event format: what Perfetto drops or draws in the wrong place is a problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Event = dict[str, Any]
METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
FLOWS = "stf"


def problems(events: Sequence[Event]) -> list[str]:
    """What is wrong with the events of a trace, in words."""
    found = [text for event in events for text in _of_one(event)]
    return found or [*_bars(events), *_begins_and_ends(events), *_objects(events), *_flows(events), *_names(events)]


def _of_one(event: Event) -> Iterator[str]:
    for key, kind in {"ph": str, "name": str, "pid": int, "tid": int, "ts": (int, float)}.items():
        if not isinstance(event.get(key), kind) or isinstance(event.get(key), bool):
            yield f"{key} of {event}"
            return
    if event["ts"] < 0:
        yield f"a negative time: {event}"
    if event["ph"] not in ["M", "X", "B", "E", "b", "e", *FLOWS]:
        yield f"an unknown phase: {event}"
    if event["ph"] == "X" and not (isinstance(event.get("dur"), (int, float)) and event["dur"] >= 0):
        yield f"no duration: {event}"
    if event["ph"] in ["b", "e", *FLOWS] and not (event.get("cat") and event.get("id")):
        yield f"no category or id: {event}"
    if not isinstance(event.get("args", {}), dict):
        yield f"arguments: {event}"


def _tracks(events: Iterable[Event], kinds: str) -> Iterable[list[Event]]:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in kinds:
            tracks[event["pid"], event["tid"]].append(event)
    return tracks.values()


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _bars(events: Sequence[Event]) -> Iterator[str]:
    for track in _tracks(events, "X"):
        around: list[int] = []
        for event in sorted(track, key=lambda event: (_ns(event["ts"]), -_ns(event["dur"]))):
            start, end = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
            while around and around[-1] <= start:
                around.pop()
            if around and end > around[-1]:
                yield f"neither after nor inside of the bar before it: {event}"
            around.append(end)


def _begins_and_ends(events: Sequence[Event]) -> Iterator[str]:
    for track in _tracks(events, "BE"):
        yield from _matched(sorted(track, key=lambda event: event["ts"]), "BE")


def _objects(events: Sequence[Event]) -> Iterator[str]:
    objects: dict[tuple[int, str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            objects[event["pid"], event["cat"], event["id"]].append(event)
    for of_one in objects.values():
        if [event["ts"] for event in of_one] != sorted(event["ts"] for event in of_one):
            yield f"not in the order of time: {of_one}"
        yield from _matched(of_one, "be")


def _matched(events: Iterable[Event], kinds: str) -> Iterator[str]:
    begun: list[Event] = []
    for event in events:
        if event["ph"] == kinds[0]:
            begun.append(event)
        elif not begun or begun.pop()["name"] != event["name"]:
            yield f"an end without a begin: {event}"
    yield from (f"a begin without an end: {event}" for event in begun)


def _flows(events: Sequence[Event]) -> Iterator[str]:
    flows: dict[tuple[str, Any], list[str]] = defaultdict(list)
    for event in sorted((event for event in events if event["ph"] in FLOWS), key=lambda event: event["ts"]):
        flows[event["cat"], event["id"]].append(event["ph"])
    for which, kinds in flows.items():
        if len(kinds) < 2 or kinds[0] != "s" or kinds[-1] != "f" or set(kinds[1:-1]) - {"t"}:
            yield f"the flow {which} is {kinds}"


def _names(events: Sequence[Event]) -> Iterator[str]:
    named: set[tuple[str, int]] = set()
    process_of: dict[int, int] = {}
    for event in events:
        if event["ph"] == "M":
            key = METADATA.get(event["name"])
            if key is None or key not in event.get("args", {}):
                yield f"unknown metadata: {event}"
            named.add((event["name"], event["tid" if event["name"].startswith("thread") else "pid"]))
        if process_of.setdefault(event["tid"], event["pid"]) != event["pid"]:
            yield f"a thread of two processes: {event}"
    for event in events:
        if ("process_name", event["pid"]) not in named:
            yield f"a process without a name: {event}"
        if event["ph"] in "XBE" and ("thread_name", event["tid"]) not in named:
            yield f"a thread without a name: {event}"
