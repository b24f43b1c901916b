"""The files of a trace: the timeline as JSON of the Chrome trace event format, and one line for each agent session.

The timeline is written in a thread, outside of the time of the steps. If a file cannot be written any more, as on a
full disk, a warning is logged, and the run continues.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from areno import trace
from areno.errors import ArenoError, Problem

logger = logging.getLogger("areno")

FOLDER = "traces"  # of the traces in the folder of a run

_MOST_BYTES = 256 * 2**20  # of one file, so that a browser can show it
_END = b"\n]\n"
_PROCESSES = {
    "driver": (1, "driver"),
    "reward": (2, "reward processes"),
    "reward calls": (2, "reward processes"),
    "agent": (3, "agent processes"),
    "agent calls": (3, "agent processes"),
    "samples": (4, "samples"),
    "requests": (5, "requests of agents"),
}
"""Group of a lane -> number and name of the process that stands for it in the timeline."""
_FIRST_RANK, _TRACKS = 100, 1000


@contextmanager
def make_trace_folder(folder: Path) -> Iterator[None]:
    """Make a folder of traces, and convert an OSError to an ArenoError that names the setting."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        text = "{} cannot be written: {}; free space there or set another folder"
        raise ArenoError(Problem("cluster.fileroot", text, folder, error.strerror)) from error


class TraceFile:
    """The timeline of a run, which Perfetto and `areno trace` read: traces/trace-0001.json in the folder of the run.

    The file grows, and is complete JSON after each write. A process that is killed while it writes leaves a file
    without its end, which Perfetto and `areno trace` also read. Each process of a run writes a file of its own, and
    begins another file after 256 MiB.
    """

    def __init__(self, folder: Path):
        self._folder, self._origin = folder, trace.now()
        self._writer = ThreadPoolExecutor(1, "areno-trace")
        self._known: set[tuple[int, int]] = set()  # processes and tracks whose names are in the file
        self._file: BinaryIO | None = None
        with make_trace_folder(folder):
            self._open()

    def _open(self) -> None:
        number = 1 + max((int(path.stem[6:]) for path in trace_files(self._folder)), default=0)
        self._file = open(self._folder / f"trace-{number:04}.json", "xb", buffering=0)  # noqa: SIM115
        self._size = 0
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._origin / 1e9))
        self._known = set()
        lines = [
            *self._json_of_lane_names("driver", "main"),
            _metadata_event("process_labels", 1, 0, {"labels": f"began {began}"}),
        ]
        self._size = _write(self._file, ("[\n" + ",\n".join(lines)).encode() + _END)

    def write(self, events: Sequence[trace.Event]) -> None:
        """Write events in the background, in any order. Pass overlapping events of the same lane in one call."""
        if events and self._file is not None:
            self._writer.submit(self._append, events)

    def _append(self, events: Sequence[trace.Event]) -> None:
        if self._file is None:
            return
        try:
            if self._size > _MOST_BYTES:
                self._file.close()
                self._open()
            lines = ",\n".join(self._json_of_events(events))
            self._file.seek(self._size - len(_END))
            self._size = self._size - len(_END) + _write(self._file, b",\n" + lines.encode() + _END)
        except OSError as error:
            with suppress(OSError, ValueError):  # ValueError: the file is closed, and the next one was not opened
                self._file.truncate(max(0, self._size - len(_END)))
                self._file.close()
            self._file = None
            logger.warning("the trace cannot be written any more: %s: %s", self._folder, error.strerror)

    def _json_of_events(self, events: Sequence[trace.Event]) -> Iterator[str]:
        by_lane: dict[str, list[trace.Event]] = {}
        for event in events:
            by_lane.setdefault(event[0], []).append(event)
        for lane, of_lane in by_lane.items():
            group, is_object, track = lane.partition("#")
            if not is_object:
                group, _, track = lane.partition("/")
            yield from self._json_of_lane_names(group, "" if is_object else track)
            pid, tid = _process_and_thread_id(group, "" if is_object else track)
            nested = _nested_events(of_lane)
            yield from (
                self._json_of_object_events(group, track, nested, pid, tid)
                if is_object
                else self._json_of_spans(nested, pid, tid)
            )

    def _json_of_spans(self, events: Sequence[tuple[trace.Event, int]], pid: int, tid: int) -> Iterator[str]:
        rest, origin = f'"pid":{pid},"tid":{tid}', self._origin
        for (_, name, start, end, arguments), _ in events:
            start = max(0, start - origin)
            times = f'"ts":{start / 1000:.3f},"dur":{max(0, end - origin - start) / 1000:.3f}'
            yield f'{{"ph":"X","name":{_name(name)},{rest},{times}{_arguments_json(arguments)}}}'

    def _json_of_object_events(
        self, group: str, track: str, events: Sequence[tuple[trace.Event, int]], pid: int, tid: int
    ) -> list[str]:
        """Return, in the order of time, the JSON of a begin event and an end event for each event of one object."""
        rest, origin = f'"cat":{_name(group)},"id":{_json(track)},"pid":{pid},"tid":{tid}', self._origin
        lines: list[str] = []
        ends: list[str] = []  # of the events that are running, the outermost first
        for (_, name, start, end, arguments), depth in events:
            lines += ends[: depth - len(ends) - 1 : -1] if len(ends) > depth else ()
            del ends[depth:]
            both = f'"name":{_name(name)},{rest},"ts":'
            lines.append(f'{{"ph":"b",{both}{max(0, start - origin) / 1000:.3f}{_arguments_json(arguments)}}}')
            ends.append(f'{{"ph":"e",{both}{max(0, end - origin) / 1000:.3f}}}')
        return lines + ends[::-1]

    def _json_of_lane_names(self, group: str, track: str) -> Iterator[str]:
        """Yield the JSON that names the process and the track of a lane, unless the file has it already."""
        pid, tid = _process_and_thread_id(group, track)
        if (pid, 0) not in self._known:
            self._known.add((pid, 0))
            yield _metadata_event("process_name", pid, 0, {"name": _PROCESSES.get(group, (pid, group))[1]})
            yield _metadata_event("process_sort_index", pid, 0, {"sort_index": pid})
        if track and (pid, tid) not in self._known:
            self._known.add((pid, tid))
            yield _metadata_event("thread_name", pid, tid, {"name": track})

    def close(self) -> None:
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()
        self._file = None


class SessionFile:
    """Writes a line of JSON for each agent session to traces/sessions.jsonl, `threshold` lines at a time."""

    def __init__(self, folder: Path, threshold: int):
        self.path, self._threshold = folder / "sessions.jsonl", threshold
        self._lines: list[str] = []
        with make_trace_folder(folder):
            self.path.touch()

    def add(self, record: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(record) + "\n")
        if len(self._lines) >= self._threshold:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            logger.warning("lines about %d agent sessions were lost: %s: %s", len(lines), self.path, error.strerror)


def trace_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("trace-*.json") if path.stem[6:].isdigit())


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events (Chrome trace event format) of a timeline. An incomplete last line is left out."""
    events = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines):
        text = line.rstrip(b",")
        if text in (b"[", b"]", b""):
            continue
        try:
            event = json.loads(text)
            if not isinstance(event, dict) or "ph" not in event:
                raise ValueError
        except ValueError as error:
            if number == len(lines) - 1:  # the end of a file whose process was killed
                break
            raise ArenoError("{} is not a trace of areno: line {} is no event", path, number + 1) from error
        events.append(event)
    return events


def _write(file: BinaryIO, content: bytes) -> int:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
    return len(content)


def _process_and_thread_id(group: str, track: str) -> tuple[int, int]:
    """Return (process id, thread id) of a lane. Thread ids differ between processes, as Perfetto expects it."""
    if group in _PROCESSES:
        pid = _PROCESSES[group][0]
    else:
        pid = _FIRST_RANK + int(group.removeprefix("rank "))
    digits = track.rpartition(" ")[2]
    number = 10 + int(digits) if digits.isdigit() else {"": 0, "main": 1, "commands": 1, "device": 2}[track]
    return pid, pid * _TRACKS + number


def _nested_events(events: list[trace.Event]) -> list[tuple[trace.Event, int]]:
    """Sort the events of a lane, and shorten each to the end of the enclosing event. Return (event, depth) of each."""
    found: list[tuple[trace.Event, int]] = []
    around: list[int] = []  # ends of the events that have not ended
    for event in sorted(events, key=lambda event: (event[2], -event[3])):
        lane, name, start, end, arguments = event
        while around and around[-1] <= start:
            around.pop()
        if around and end > around[-1]:
            end = around[-1]
            event = lane, name, start, end, arguments
        found.append((event, len(around)))
        around.append(end)
    return found


def _metadata_event(name: str, pid: int, track: int, arguments: Mapping[str, Any]) -> str:
    tid = track or pid * _TRACKS
    return f'{{"ph":"M","name":{_json(name)},"pid":{pid},"tid":{tid},"ts":0{_arguments_json(arguments)}}}'


def _arguments_json(arguments: Mapping[str, Any]) -> str:
    """Return the arguments as the last field of an event's JSON, with a comma before it. "" without arguments."""
    return f',"args":{_json(arguments)}' if arguments else ""


_json: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode
_name = lru_cache(1024)(_json)  # there are few names
