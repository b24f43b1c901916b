"""What is cut back when a run goes on: lines, events and samples of steps that come again."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areno.run.states import folder_fingerprint, rows_fingerprint
from areno.tracking.run_folder import RunFiles
from areno.tracking.scalar_files import Jsonl, TensorBoard
from tests import kill_runs


def session(files: RunFiles, steps: range, resumed: int | None = None) -> None:
    """What a session of a run writes."""
    trackers = TensorBoard(files.events, files.event_suffix), Jsonl(files.folder / "logs/metrics.jsonl")
    for tracker in trackers:
        if resumed is not None:
            tracker.resume(resumed)
        for step in steps:
            tracker.log(step, {"train/loss": float(step)})
        tracker.finish()
    for step in steps:
        for folder in ("rollouts", "eval", "eval/hard"):
            (files.folder / folder).mkdir(parents=True, exist_ok=True)
            (files.folder / folder / f"{step:06d}.jsonl").write_text("{}")
    with (files.folder / "logs/run.log").open("a") as log:
        log.writelines(f"step {step}\n" for step in steps)


def test_files_are_cut_back_to_a_step(tmp_path):
    files = RunFiles(tmp_path)
    session(files, range(1, 4))
    sizes = files.sizes()
    session(files, range(4, 6))  # a session of its own, whose state was lost
    (tmp_path / "rollouts/000006.tmp").write_text("half")
    begun_at = files.sizes()
    with (tmp_path / "logs/run.log").open("a") as log:
        log.write("this session\n")
        log.flush()
        files.truncate_to_step(3, sizes, begun_at)
        log.write("goes on\n")
    assert (tmp_path / "logs/run.log").read_text() == "step 1\nstep 2\nstep 3\nthis session\ngoes on\n"
    assert (tmp_path / "logs/dropped.log").read_text() == "step 4\nstep 5\n"
    for folder in ("rollouts", "eval", "eval/hard"):
        assert sorted(p.name for p in (tmp_path / folder).iterdir() if p.is_file()) == [
            f"00000{step}.jsonl" for step in (1, 2, 3)
        ]
    session(files, range(4, 5), resumed=3)
    lines = (tmp_path / "logs/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert [step for step, *_ in kill_runs.events(tmp_path)] == [1, 2, 3, 4]


def test_samples_that_are_being_written_are_no_part_of_a_state(tmp_path, monkeypatch):
    """Their step may be another than that of the state, and the file has its name before it can be opened."""
    files = RunFiles(tmp_path)
    session(files, range(1, 2))
    (tmp_path / "rollouts/000002.tmp").write_text("half")
    synced = []
    monkeypatch.setattr("areno.tracking.run_folder.sync", lambda path: synced.append(path.name))
    files.sync()
    assert synced.count("000001.jsonl") == 3
    assert "000002.tmp" not in synced


def test_a_tensorboard_that_has_read_later_steps_drops_them(tmp_path):
    """It keeps the points in memory, and the files that it has read to their end do not grow again."""
    files = RunFiles(tmp_path)
    session(files, range(1, 4))
    sizes = files.sizes()
    session(files, range(4, 7))
    board = EventAccumulator(str(files.events))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    files.truncate_to_step(3, sizes, files.sizes())
    session(files, range(4, 6), resumed=3)
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_a_clock_that_was_set_back_is_not_seen_in_the_events(tmp_path, monkeypatch):
    files = RunFiles(tmp_path)
    session(files, range(1, 4))
    now = time.time()
    monkeypatch.setattr("areno.tracking.scalar_files.time.time", lambda: now - 7200)
    session(files, range(4, 6), resumed=3)
    assert [step for step, *_ in kill_runs.events(tmp_path)] == [1, 2, 3, 4, 5]
    board = EventAccumulator(str(files.events))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_runs_that_share_a_folder_of_events_keep_their_own(tmp_path):
    one, two = (RunFiles(tmp_path / name, tmp_path / "events") for name in ("one", "two"))
    for files in (one, two):
        session(files, range(1, 3))
    before = two.sizes()
    one.truncate_to_step(0, {}, one.sizes())
    assert set(one.sizes().values()) == {0}
    assert two.sizes() == before
    assert min(before.values()) > 0


def test_rows_have_a_fingerprint_that_other_processes_find_as_well(tmp_path):
    code = (
        "from areno.run.states import rows_fingerprint\n"
        "import datetime\n"
        "rows = [{'prompt': f'{n}', 'tags': {'a', 'b', 'c'}, 'any': object(), 'day': datetime.date(2024, 1, n + 1), "
        "1: 'x', (2,): 'y', 'half': '\\ud800'} for n in range(9)]\n"
        "print(rows_fingerprint(rows))"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(found) == 1
    rows = [{"prompt": str(n), "day": datetime.date(2024, 1, 1)} for n in range(200)]
    assert rows_fingerprint(rows) == rows_fingerprint(list(rows))
    assert rows_fingerprint(rows) != rows_fingerprint(rows[:-1])
    assert rows_fingerprint(rows) != rows_fingerprint(rows[1:] + rows[:1])


def test_a_folder_has_a_fingerprint_of_what_a_model_is_made_of(tmp_path):
    def folder(name: str, weights: bytes, **files: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(weights)
        for file, text in files.items():
            (path / file).write_text(text)
        return path

    weights = bytes(range(256)) * 1000
    same = [folder("a", weights), folder("b", weights, README="about it")]
    changed = [folder("c", weights[:-1] + b"x"), folder("d", weights + b"x"), folder("e", b"x" + weights[1:])]
    assert len({folder_fingerprint(path) for path in same}) == 1
    assert len({folder_fingerprint(path) for path in same + changed}) == 4
