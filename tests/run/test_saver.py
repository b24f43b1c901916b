"""When checkpoints are due, and that one is on the disk whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areno.config.run import EvaluatorConfig, FrequencyConfig, SaverConfig
from areno.errors import CheckpointError, ConfigError, EngineError, Key
from areno.files.durable import atomic_write_folder
from areno.run.checkpoints import Saver
from areno.run.progress import Trigger
from tests.helpers.processes import started


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub/weights").write_bytes(b"w" * 1000)


def test_trigger_by_steps_epochs_and_seconds():
    def due_at(config, asked):
        times = iter([0.0, *(now for _, _, now in asked)])
        trigger = Trigger(config, lambda: next(times))
        return [i for i, (step, ended, _) in enumerate(asked) if trigger.is_due(step, ended)]

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
    saver.lock_folder(tmp_path)
    assert saver.due(100)
    assert not saver.due(101)
    path = saver.save(write_model, 100)
    assert path == tmp_path / "checkpoints/step-000100"
    assert (path / "sub/weights").read_bytes() == b"w" * 1000
    saver.save(write_model, 101)
    assert saver.saved_step == 101
    assert sorted(p.name for p in path.parent.iterdir()) == [".owner", "latest", "step-000100", "step-000101"]
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
    assert not before.is_due(1, epoch_ended=True)
    after.load_state_dict(before.state_dict())
    assert not after.is_due(2)
    assert after.is_due(3), "60 seconds before, 40 after"
    assert after.is_due(4, epoch_ended=True), "the second epoch"


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
            saver.lock_folder(tmp_path)
        with pytest.raises(CheckpointError, match=r"saver\.path: .*file"):
            saver.save(write_model, 1)

    def refuse(self, data, encoding):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(CheckpointError, match=r"saver\.path: .*cannot be written: Read-only file system"):
        Saver(SaverConfig(), tmp_path / "new").lock_folder(tmp_path)


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
    (tmp_path / ".owner").write_text(f"{tmp_path}\n")
    Saver(SaverConfig(), tmp_path).lock_folder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".owner", ".tmp-other", "mine", "step-000001", "step-000002"]
    assert (tmp_path / "step-000002/weights").read_text() == "step-000002"
    assert (tmp_path / "step-000001/weights").read_text() == ".old-step-000001"


def claimed(folder: Path, run: str) -> Saver:
    saver = Saver(SaverConfig(path=str(folder)), "default")
    saver.lock_folder(Path(run))
    return saver


def test_a_folder_belongs_to_the_run_that_has_checkpoints_there(tmp_path):
    one = claimed(tmp_path / "a/b", "one")
    with pytest.raises(ConfigError, match=r"saver\.path: .*a/b belongs to the run in .*/one, which is still running"):
        claimed(tmp_path / "a/b", "two")
    one.save(write_model, 1)
    one.unlock_folder()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"saver\.path: .*a/b holds the checkpoints of the run in .*/one; choose ano"):
        claimed(tmp_path / "a/b", "two")
    again = claimed(tmp_path / "a/b", "one")  # it may go on from its state
    with pytest.raises(ConfigError, match=r"holds the checkpoints of the run in .*/one"):
        again.refuse_checkpoints()
    again.unlock_folder()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("left", ["step-000007", ".old-step-000007"])
def test_checkpoints_without_an_owner_belong_to_nobody_who_comes(tmp_path, left):
    (tmp_path / left).mkdir()
    with pytest.raises(ConfigError, match=r"saver\.path: .* holds the checkpoints of an earlier run; choose another"):
        claimed(tmp_path, "two")
    assert [p.name for p in tmp_path.iterdir()] == [left]


def test_a_run_without_checkpoints_leaves_the_folders_as_they_were(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in ("mine", "new/deep"):
        claimed(tmp_path / folder, "one").unlock_folder()
        claimed(tmp_path / folder, "two").unlock_folder()
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]


def interrupt_after(monkeypatch, name: str, number: int) -> None:
    """Send this process a signal whenever the method `name` of a Path has done its work."""
    method = getattr(Path, name)

    def then_interrupt(self, *args, **how):
        result = method(self, *args, **how)
        os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(Path, name, then_interrupt)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", ["rename", "symlink_to", "replace"])
def test_an_interrupt_waits_for_the_step_that_has_its_name(tmp_path, monkeypatch, at, number):
    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt

    saver = Saver(SaverConfig(), tmp_path)
    saver.save(write_model, 1)
    before = signal.signal(number, interrupt)
    try:
        with monkeypatch.context() as patch:
            interrupt_after(patch, at, number)
            with pytest.raises(Interrupt):
                saver.save(write_model, 2)
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
    assert saver.saved_step == 2
    assert os.readlink(tmp_path / "latest") == "step-000002"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001", "step-000002"]


def test_a_run_in_another_thread_saves(tmp_path):
    thread = threading.Thread(target=Saver(SaverConfig(), tmp_path).save, args=(write_model, 1))
    thread.start()
    thread.join()
    assert (tmp_path / "latest/config.json").exists()


@pytest.mark.parametrize("target", ["there", "there/not yet"])
def test_a_link_is_followed(tmp_path, target):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(target, target_is_directory=True)
    for _ in range(2):
        atomic_write_folder(tmp_path / "link", write_model)
    assert os.readlink(tmp_path / "link") == target
    assert (tmp_path / target / "config.json").read_text() == "{}"
    assert not list(tmp_path.rglob(".*"))


def test_killed_while_saving(tmp_path):
    script = f"""
import time
from pathlib import Path
from areno.run.checkpoints import Saver
from areno.config.run import SaverConfig
def write(folder):
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
saver = Saver(SaverConfig(), {str(tmp_path)!r})
saver.lock_folder(Path("one"))
saver.save(write, 7)
"""
    root = Path(__file__).parents[2]
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout.readline() == "writing\n"
        other = Saver(SaverConfig(path=str(tmp_path)), "default")
        expected = r"saver\.path: .* belongs to the run in .*/one, which is still running; choose"
        with pytest.raises(ConfigError, match=expected):
            other.lock_folder(Path("other"))
        with pytest.raises(ConfigError, match=r"trial_name: the run in .*/one is still running, in another process"):
            other.lock_folder(root / "one")
        with pytest.raises(CheckpointError, match="another process is writing there"):
            other.save(write_model, 7)
        assert (tmp_path / ".tmp-step-000007/half").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".owner", ".tmp-step-000007"]
    other.lock_folder(Path("other"))
    other.unlock_folder()
    assert list(tmp_path.iterdir()) == []
