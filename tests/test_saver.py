"""When checkpoints are due, and that one is on the disk whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areno.checkpoint.saver import Saver
from areno.checkpoint.trigger import Trigger
from areno.config.run import EvaluatorConfig, FrequencyConfig, SaverConfig
from areno.errors import CheckpointError, EngineError, Key


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub/weights").write_bytes(b"w" * 1000)


def test_trigger_by_steps_epochs_and_seconds():
    def due_at(config, asked):
        times = iter([0.0, *(now for _, _, now in asked)])
        trigger = Trigger(config, lambda: next(times))
        return [i for i, (step, ended, _) in enumerate(asked) if trigger.due(step, ended)]

    steps = [(step, step % 4 == 0, 10.0 * step) for step in range(1, 13)]
    assert due_at(FrequencyConfig(), steps) == []
    assert due_at(FrequencyConfig(freq_steps=5), steps) == [4, 9]
    assert due_at(FrequencyConfig(freq_epochs=1), steps) == [3, 7, 11]
    assert due_at(FrequencyConfig(freq_epochs=2), steps) == [7]
    assert due_at(FrequencyConfig(freq_secs=25.0), steps) == [2, 5, 8, 11]
    assert due_at(EvaluatorConfig(freq_steps=5, freq_epochs=1), steps) == [3, 4, 7, 9, 11]
    assert due_at(FrequencyConfig(freq_steps=5, freq_secs=45.0), steps) == [4, 9]  # saving restarts the clock


def test_save(tmp_path):
    saver = Saver(SaverConfig(), tmp_path / "checkpoints")
    saver.check_writable()
    assert saver.due(100)
    assert not saver.due(101)
    path = saver.save(write_model, 100)
    assert path == tmp_path / "checkpoints/step-000100"
    assert (path / "sub/weights").read_bytes() == b"w" * 1000
    saver.save(write_model, 101)
    assert saver.saved_step == 101
    assert sorted(p.name for p in path.parent.iterdir()) == ["latest", "step-000100", "step-000101"]
    assert os.readlink(path.parent / "latest") == "step-000101"
    assert (path.parent / "latest/config.json").read_text() == "{}"


def test_path_of_the_configuration_wins(tmp_path):
    saver = Saver(SaverConfig(path=str(tmp_path / "mine")), tmp_path / "default")
    assert saver.save(write_model, 1) == tmp_path / "mine/step-000001"


def test_saving_a_step_again_replaces_it(tmp_path):
    saver = Saver(SaverConfig(), tmp_path)
    saver.save(lambda folder: (folder / "old").write_text("old"), 1)
    path = saver.save(lambda folder: (folder / "new").write_text("new"), 1)
    assert [p.name for p in path.iterdir()] == ["new"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "saver.path: .*No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), CheckpointError, "saver.path: .*Permission denied"),
        (
            type("SafetensorError", (Exception,), {})("I/O error: No space left"),
            CheckpointError,
            "saver.path.*No space",
        ),
        (CheckpointError("cannot write model.safetensors: disk full"), CheckpointError, "saver.path.*disk full"),
        (
            CheckpointError("no room in {}; set {}", "there", Key("saver.path")),
            CheckpointError,
            "^no room in there; set saver.path$",
        ),
        (EngineError("a worker died"), EngineError, "^a worker died$"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (ValueError("a bug"), ValueError, "^a bug$"),
    ],
)
def test_failure_leaves_nothing_half(tmp_path, error, raised, message):
    saver = Saver(SaverConfig(), tmp_path)
    saver.save(write_model, 1)

    def write(folder: Path) -> None:
        write_model(folder)
        raise error

    with pytest.raises(raised, match=message):
        saver.save(write, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert os.readlink(tmp_path / "latest") == "step-000001"
    assert saver.saved_step == 1


def test_an_old_checkpoint_stays_until_the_new_one_is_in_place(tmp_path, monkeypatch):
    saver = Saver(SaverConfig(), tmp_path)
    saver.save(lambda folder: (folder / "old").write_text("old"), 1)
    rename = Path.rename

    def fail_between(self, target):
        if self.name.startswith(".tmp-step"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_between)
    with pytest.raises(CheckpointError, match=r"saver\.path: .*Input/output error"):
        saver.save(lambda folder: (folder / "new").write_text("new"), 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert (tmp_path / "latest/old").read_text() == "old"


def test_an_old_checkpoint_goes_when_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    saver = Saver(SaverConfig(), tmp_path)
    saver.save(lambda folder: (folder / "old").write_text("old"), 1)
    there = []

    def sync(path):
        if (tmp_path / "step-000001/new").exists():
            there.append((tmp_path / ".old-step-000001/old").exists())

    monkeypatch.setattr("areno.files.durable.sync", sync)
    saver.save(lambda folder: (folder / "new").write_text("new"), 1)
    assert there[0]
    assert not (tmp_path / ".old-step-000001").exists()


@pytest.mark.parametrize("left", [".old-step-000001", ".tmp-step-000001"])
def test_what_a_crash_left_is_not_in_the_way(tmp_path, left):
    saver = Saver(SaverConfig(), tmp_path)
    for text in ("one", "two"):
        saver.save(lambda folder, text=text: (folder / "weights").write_text(text), 1)
        (tmp_path / left).mkdir()
        (tmp_path / left / "weights").write_text("half")
    assert (tmp_path / "step-000001/weights").read_text() == "two"


def test_states_go_on_where_they_were():
    config = FrequencyConfig(freq_epochs=2, freq_secs=100.0)
    times = iter([0.0, 40.0, 60.0])
    later = iter([5000.0, 5000.0, 5039.0, 5040.0, 5041.0])
    before, after = Trigger(config, lambda: next(times)), Trigger(config, lambda: next(later))
    assert not before.due(1, epoch_ended=True)
    after.load_state_dict(before.state_dict())
    assert not after.due(2)
    assert after.due(3), "60 seconds before, 40 after"
    assert after.due(4, epoch_ended=True), "the second epoch"


def test_a_saver_goes_on_where_it_was(tmp_path):
    saver, resumed = (Saver(SaverConfig(freq_epochs=2), tmp_path) for _ in range(2))
    saver.due(7, epoch_ended=True)
    saver.save(write_model, 7)
    resumed.load_state_dict(json.loads(json.dumps(saver.state_dict())))
    assert resumed.saved_step == 7
    assert resumed.due(8, epoch_ended=True)


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("x")
    for path in (blocker, blocker / "below"):
        saver = Saver(SaverConfig(path=str(path)), tmp_path)
        with pytest.raises(CheckpointError, match=r"saver\.path: .*file"):
            saver.check_writable()
        with pytest.raises(CheckpointError, match=r"saver\.path: .*file"):
            saver.save(write_model, 1)

    def refuse(self, data):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"saver\.path: .*cannot be written: Read-only file system"):
        Saver(SaverConfig(), tmp_path / "new").check_writable()


def test_start_clears_what_a_crash_left(tmp_path):
    def folder(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)

    folder(".tmp-step-000003")
    folder(".old-step-000002")  # step-000002 is there: the crash came after the exchange
    folder("step-000002")
    folder(".old-step-000001")  # step-000001 is not: in the middle of it
    folder("mine")
    (tmp_path / ".tmp-other").write_text("x")
    Saver(SaverConfig(), tmp_path).check_writable()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-other", "mine", "step-000001", "step-000002"]
    assert (tmp_path / "step-000002/weights").read_text() == "step-000002"
    assert (tmp_path / "step-000001/weights").read_text() == ".old-step-000001"


def test_killed_while_saving(tmp_path):
    script = f"""
import time
from pathlib import Path
from areno.checkpoint.saver import Saver
from areno.config.run import SaverConfig
def write(folder):
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
Saver(SaverConfig(), {str(tmp_path)!r}).save(write, 7)
"""
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [p.name for p in tmp_path.iterdir()] == [".tmp-step-000007"]
    Saver(SaverConfig(), tmp_path).check_writable()
    assert list(tmp_path.iterdir()) == []
