"""The recorder of events, and the files that it ends in: always JSON, always in the format of Perfetto."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areno import trace
from areno.errors import ArenoError
from areno.tracking import trace_file
from areno.tracking.trace_file import SessionFile, TraceFile, read_trace, trace_files
from tests.helpers.trace_events import problems


@pytest.fixture(autouse=True)
def _recorder() -> Iterator[None]:
    trace.begin()
    yield
    trace.end()


def written(folder: Path, *batches: list[trace.Event]) -> list[dict[str, Any]]:
    file = TraceFile(folder)
    for events in batches:
        file.write(events)
    file.close()
    return json.loads((folder / "trace-0001.json").read_text())


def test_spans_nest_and_carry_what_is_known(tmp_path: Path) -> None:
    with trace.span("driver/main", "step", step=3), trace.span("driver/main", "rollout"):
        pass
    inner, outer = trace.drain_events()
    assert (inner[1], outer[1], outer[4]) == ("rollout", "step", {"step": 3})
    assert outer[2] <= inner[2] <= inner[3] <= outer[3]
    assert trace.drain_events() == []
    events = written(tmp_path, [inner, outer])
    assert not problems(events)
    bars = [event for event in events if event["ph"] == "X"]
    assert [(bar["name"], bar.get("args")) for bar in bars] == [("step", {"step": 3}), ("rollout", None)]
    names = {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert {"driver", "main"} <= names


def test_nothing_is_recorded_while_it_is_off() -> None:
    trace.end()
    with trace.span("driver/main", "step"):
        trace.add("driver/main", "rollout", 1, 2)
    assert trace.drain_events() == []


def test_no_event_of_other_threads_is_lost() -> None:
    def add() -> None:
        for _ in range(2000):
            trace.add("driver/main", "x", 1, 2)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        taken += len(trace.drain_events())
    assert taken + len(trace.drain_events()) == 8000


def test_any_events_become_a_valid_file(tmp_path: Path) -> None:
    """Events that overlap, touch, have no duration, or came before the file: cut where they cannot nest."""
    pick, start = random.Random(0), trace.now()
    lanes = ["driver/main", "rank 0/commands", "rank 0/device", "rank 12/device", "reward/process 3", "agent/process 0"]
    lanes += [f"samples#{n}.0.0" for n in range(5)] + ["reward calls#0.1", "agent calls#0.1", "requests#7.0"]
    batches = [
        [
            (pick.choice(lanes), pick.choice("abc"), begin, begin + pick.choice([0, 1, 500, 5000]), {"n": 'a "quote"'})
            for begin in (start + pick.randrange(-3000, 20_000) + 100_000 * batch for _ in range(300))
        ]
        for batch in range(3)
    ]
    events = written(tmp_path, *batches)
    assert not problems(events)
    assert sum(event["ph"] in "Xb" for event in events) == 900
    assert len({event["pid"] for event in events}) == 7
    assert read_trace(tmp_path / "trace-0001.json") == events


def test_a_sample_has_its_phases_inside_of_it(tmp_path: Path) -> None:
    start = trace.now() + 10**9  # after the file was made
    trace.add("samples#1.0.0", "queued", start, start + 10)
    trace.add("samples#1.0.0", "prefill", start + 10, start + 30)
    trace.add("samples#1.0.0", "sample", start, start + 90, tokens=3)
    trace.add("samples#1.0.0", "decode", start + 30, start + 80)
    events = [event for event in written(tmp_path, trace.drain_events()) if event["ph"] in "be"]
    assert [event["ph"] + " " + event["name"] for event in events] == [
        *("b sample", "b queued", "e queued", "b prefill", "e prefill", "b decode", "e decode", "e sample")
    ]
    assert {event["id"] for event in events} == {"1.0.0"}
    assert events[-1]["ts"] - events[0]["ts"] == pytest.approx(0.09, abs=1e-3)


def test_a_file_that_was_cut_can_be_read(tmp_path: Path) -> None:
    event = ("driver/main", "step", trace.now(), trace.now() + 10**6, {"step": 1})
    whole = written(tmp_path, [event], [event])
    file = tmp_path / "trace-0001.json"
    content = file.read_bytes()
    for size in range(len(content) - 150, len(content)):  # within the last event and the end
        file.write_bytes(content[:size])
        assert read_trace(file) in (whole, whole[:-1], whole[:-2])
    file.write_text('[\n{"ph":"M"},\nnonsense,\n{"ph":"M"}\n]\n')
    with pytest.raises(ArenoError, match="line 3 is no event"):
        read_trace(file)
    file.write_bytes(b'[\n{"ph":"\xff"},\n{"ph":"M"}\n]\n')
    with pytest.raises(ArenoError, match="line 2 is no event"):
        read_trace(file)


def test_another_process_and_a_large_file_continue_in_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "_MOST_BYTES", 1000)
    events = [("rank 0/device", "decode", trace.now(), trace.now() + 5, {})]
    written(tmp_path, *[events] * 20)
    TraceFile(tmp_path).close()
    files = trace_files(tmp_path)
    assert len(files) > 2
    assert [file.name for file in files] == [f"trace-{number:04}.json" for number in range(1, len(files) + 1)]
    read = [json.loads(file.read_text()) for file in files]
    assert not [problem for of_file in read for problem in problems(of_file)]
    assert sum(event["ph"] == "X" for of_file in read for event in of_file) == 20


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "traces").touch()
    for make in (lambda: TraceFile(tmp_path / "traces"), lambda: SessionFile(tmp_path / "traces", 1)):
        with pytest.raises(ArenoError) as caught:
            make()
        assert str(caught.value).startswith(f"cluster.fileroot: {tmp_path}/traces cannot be written: ")
        assert "\n" not in str(caught.value)


def test_a_full_disk_ends_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    file = TraceFile(tmp_path)
    events = [("driver/main", "step", trace.now(), trace.now() + 5, {})]
    file.write(events)
    file._writer.submit(monkeypatch.setattr, trace_file, "_write", full).result()
    for _ in range(3):
        file.write(events)
    file.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the trace cannot be written any more: {tmp_path}: No space left on device"
    ]
    assert sum(event["ph"] == "X" for event in read_trace(tmp_path / "trace-0001.json")) == 1


@pytest.mark.parametrize("function", ["open", "_write"])
def test_a_disk_that_is_full_when_a_new_file_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_file, "_MOST_BYTES", 500)
    file = TraceFile(tmp_path)
    events = [("driver/main", "step", trace.now(), trace.now() + 5, {})]
    file.write(events * 10)
    file._writer.submit(monkeypatch.setattr, trace_file, function, full, raising=False).result()
    for _ in range(3):
        file.write(events)
    file.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the trace cannot be written any more: {tmp_path}: No space left on device"
    ]
    whole, *rest = map(read_trace, trace_files(tmp_path))
    assert sum(event["ph"] == "X" for event in whole) == 10
    assert [path.stat().st_size for path in trace_files(tmp_path)[1:]] == [0 for _ in rest]


def test_sessions_are_written_many_at_a_time(tmp_path: Path) -> None:
    file = SessionFile(tmp_path, 3)
    for number in range(4):
        file.add({"step": number})
        assert len(file.path.read_text().splitlines()) == (3 if number > 1 else 0)
    file.flush()
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [{"step": n} for n in range(4)]


GOOD = {"ph": "X", "name": "a", "pid": 1, "tid": 10, "ts": 0, "dur": 5}
NAMES = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "p"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 10, "ts": 0, "args": {"name": "t"}},
]
OBJECT = {"ph": "b", "name": "a", "pid": 1, "tid": 10, "ts": 0, "cat": "c", "id": "1"}


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([{**GOOD, "ph": "?"}], "an unknown phase"),
        ([{key: value for key, value in GOOD.items() if key != "tid"}], "tid of"),
        ([{**GOOD, "dur": -1}], "no duration"),
        ([{**GOOD, "ts": -1}], "a negative time"),
        ([GOOD, {**GOOD, "ts": 3}], "neither after nor inside"),
        ([{**GOOD, "ph": "B"}], "a begin without an end"),
        ([{**GOOD, "ph": "E"}], "an end without a begin"),
        ([OBJECT], "a begin without an end"),
        ([OBJECT, {**OBJECT, "ph": "e", "name": "other"}], "an end without a begin"),
        ([{**OBJECT, "ts": 2}, {**OBJECT, "ph": "e", "ts": 1}], "not in the order of time"),
        ([{**OBJECT, "id": ""}], "no category or id"),
        ([{**OBJECT, "ph": "s"}], "the flow"),
        ([{**GOOD, "tid": 11}], "a thread without a name"),
        ([{**GOOD, "pid": 2}], "a thread of two processes"),
        ([{**GOOD, "pid": 2, "tid": 20}], "a process without a name"),
        ([{**NAMES[0], "name": "colour"}], "unknown metadata"),
    ],
)
def test_the_check_finds_what_is_wrong(events: list[dict[str, Any]], problem: str) -> None:
    assert not problems([*NAMES, GOOD, OBJECT, {**OBJECT, "ph": "e"}])
    assert problems([*NAMES, *events])[0].startswith(problem)
