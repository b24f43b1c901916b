"""States on the disk: whole or absent, found again, and what a full disk or a damaged one does."""

from __future__ import annotations

import json
import resource
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from areno.config.run import RecoverConfig
from areno.engine.engine import Engine
from areno.errors import CheckpointError, EngineError
from areno.files.durable import locked
from areno.files.paths import find_file
from areno.run.state_writer import StateWriter
from areno.run.states import StateFolder
from tests import kill_runs
from tests.helpers.resumed import folder_of, go, killed_after, log, states, stopped_sft, whole
from tests.helpers.waiting import until

OFTEN = ["recover.freq_steps=1"]


@pytest.fixture
def work(tmp_path, monkeypatch, tmp_path_factory):
    """A run that was killed after step 3, with the states of steps 2 and 3."""
    monkeypatch.chdir(tmp_path)
    stopped_sft(3, tmp_path_factory)
    return folder_of("sft") / "state"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "weights flipped": lambda state: flip(state / "engine/actor.master.0.bin"),
    "weights truncated": lambda state: (state / "engine/actor.exp_avg.0.bin").write_bytes(b"x"),
    "weights gone": lambda state: (state / "engine/actor.exp_avg_sq.0.bin").unlink(),
    "engine gone": lambda state: shutil.rmtree(state / "engine"),
    "index flipped": lambda state: flip(state / "engine/index.json"),
    "record flipped": lambda state: flip(state / "run.json"),
    "record gone": lambda state: (state / "run.json").unlink(),
    "manifest gone": lambda state: (state / "manifest.json").unlink(),
    "manifest flipped": lambda state: flip(state / "manifest.json"),
    "manifest empty": lambda state: (state / "manifest.json").write_text(""),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_state(how, work, tmp_path_factory):
    DAMAGE[how](work / "step-000003")
    assert go("sft", *OFTEN) == 0
    assert "warning: the state of step 3 is damaged: " in log()
    assert f"It is kept as {work / 'damaged-step-000003'}" in log()
    assert "going on after step 2; 5 steps are left" in log()
    assert [states()[0], states()[-1]] == ["damaged-step-000003", "step-000007"]
    expected = whole("sft", tmp_path_factory)
    assert kill_runs.differences(expected, kill_runs.left_by(work.parent)) == []


def test_nothing_but_damage(work, capsys):
    for state in work.glob("step-*"):
        DAMAGE["record gone"](state)
    before = sorted(path.relative_to(work) for path in work.rglob("*.bin"))
    capsys.readouterr()
    for _ in range(2):
        assert go("sft", *OFTEN) == 1
        said = capsys.readouterr().err
        assert f"error: the states of this run in {work} are damaged (damaged-step-000002, damaged-step-000003)" in said
    assert len(sorted(work.rglob("*.bin"))) == len(before)


def test_states_that_somebody_has_removed(work, capsys):
    for state in work.glob("step-*"):
        shutil.rmtree(state)
    capsys.readouterr()
    assert go("sft", *OFTEN) == 1
    assert f"the states of this run in {work} are gone; the last was step-000003" in capsys.readouterr().err


def test_another_version_of_the_format(work, capsys):
    record = work / "step-000003/run.json"
    text = json.dumps({**json.loads(record.read_text()), "format": 0, "areno": "0.0.7"})
    record.write_text(text)
    manifest = work / "step-000003/manifest.json"
    sizes = json.loads(manifest.read_text())["sizes"]
    manifest.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "sizes": {**sizes, "run.json": len(text)}}))
    capsys.readouterr()
    assert go("sft", *OFTEN) == 1
    assert "has format 0, of areno 0.0.7; this areno reads format 2" in capsys.readouterr().err
    assert states() == ["step-000002", "step-000003"]


def test_two_at_once(work, capsys):
    capsys.readouterr()
    with locked(work):
        assert go("sft", *OFTEN) == 2
        assert go("sft", resume=work.parent) == 2
    text = f"error: trial_name: the run in {work.parent} is still running, in another process\n"
    assert capsys.readouterr().err == 2 * text


# A disk without room -------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_states_and_nothing_else(tmp_path, tmp_path_factory, monkeypatch):
    """Large files cannot be written while the states of steps 3 to 5 are."""
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows("sft", tmp_path)
    save_state, written, before = Engine.save_state, Engine.is_state_written, resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = []

    def save(self, folder, *how):
        if any(f"step-00000{step}" in str(folder) for step in (3, 4, 5)):
            seen.append([name for name in states() if name[0] != "."])
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
        save_state(self, folder, *how)

    def waited(self, wait=False):
        is_under_way = self._writes_state
        try:
            return written(self, wait=True)
        finally:
            if is_under_way:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(Engine, "save_state", save)
    monkeypatch.setattr(Engine, "is_state_written", waited)
    poll = StateWriter.poll
    monkeypatch.setattr(StateWriter, "poll", lambda self, wait=False: poll(self, wait=True))
    assert go("sft", *OFTEN, "saver.freq_steps=null") == 0
    told = [line.partition(" ")[2] for line in log().splitlines() if "could not be written" in line]
    assert len(told) == 3
    for step, line in zip((3, 4, 5), told, strict=True):
        assert line.startswith(f"warning: the state of step {step} could not be written: ")
        assert line.endswith("File too large. The run continues; that of step 2 stays")
    assert seen == 3 * [["step-000001", "step-000002"]]
    assert states()[-1] == "step-000007"
    expected = whole("sft", tmp_path_factory)
    wrong = kill_runs.differences(expected, kill_runs.left_by(folder_of("sft")))
    assert {name.split("/")[1] for name in wrong} == {"step-000003", "step-000006"}, "the checkpoints left out here"


class FakeEngine:
    """Writes when it is told that it has written."""

    token_budgets: ClassVar[dict] = {}

    def __init__(self):
        self.folder = None
        self.is_done = False
        self.error = None

    def save_state(self, folder, with_moments=True):
        self.folder, self.is_done = Path(folder), False

    def is_state_written(self, wait=False):
        if self.error is not None:
            raise self.error
        if (self.is_done or wait) and self.folder:
            (self.folder / "weights").write_text("w")
            self.folder = None
        return self.folder is None


@pytest.fixture
def writer(tmp_path):
    engine = FakeEngine()
    (tmp_path / "state").mkdir()
    made = StateWriter(RecoverConfig(), StateFolder(tmp_path / "state", 2), lambda: engine, lambda: None)
    return made, engine, tmp_path / "state"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_state_is_absent_until_it_is_whole(writer):
    states, _, folder = writer
    assert states.begin_write(1, {"run": 1})
    states.poll()
    assert [name[:16] for name in names(folder)] == [".tmp-step-000001"]
    assert not states.begin_write(2, {"run": 2}), "one after another"
    states.poll(wait=True)
    assert names(folder) == ["latest", "step-000001"]
    assert states.states.newest().record["run"] == 1


def test_the_newest_states_stay(writer):
    states, _, folder = writer
    for step in (1, 2, 3):
        assert states.write(step, {"run": step})
    assert names(folder) == ["latest", "step-000002", "step-000003"]
    assert (folder / "latest").read_text() == "step-000003\n"


def test_a_state_of_the_same_step_shares_its_weights(writer):
    states, _, folder = writer
    assert states.write(1, {"run": "before the evaluation"})
    inode = (folder / "step-000001/engine/weights").stat().st_ino
    assert states.write(1, {"run": "after it"})
    assert (folder / "step-000001/engine/weights").stat().st_ino == inode
    assert states.states.newest().record["run"] == "after it"
    assert names(folder) == ["latest", "step-000001"]


@pytest.mark.parametrize("error", [CheckpointError("disk full"), EngineError("a worker died")])
def test_a_state_that_cannot_be_whole_is_not_there(writer, error, caplog):
    states, engine, folder = writer
    assert states.write(1, {})
    states.begin_write(2, {})
    engine.error = error
    if isinstance(error, EngineError):
        with pytest.raises(EngineError, match="a worker died"):
            states.poll()
    else:
        states.poll()
        warning = "the state of step 2 could not be written: disk full. The run continues; that of step 1 stays"
        assert warning in caplog.text
    engine.error = None
    states.poll(wait=True)
    assert names(folder) == ["latest", "step-000001"]


def test_a_disk_that_would_be_full_is_not_filled(writer, monkeypatch, caplog):
    states, engine, folder = writer
    assert states.write(1, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    assert not states.write(2, {})
    assert "GiB free, and it needs" in caplog.text
    assert engine.folder is None
    assert names(folder) == ["latest", "step-000001"]


def test_older_states_make_room(writer, monkeypatch, caplog):
    """There is room for two states. The newest one stays until the next is complete."""
    states, _, folder = writer
    assert states.write(1, {})
    size = states.states.newest_size_bytes()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, (2 - len(states.states.steps())) * size)
    )
    for step in (2, 3, 4):
        assert states.write(step, {})
        assert names(folder) == ["latest", f"step-00000{step - 1}", f"step-00000{step}"]
    assert caplog.text.count("makes room for the next one") == 2
    assert "could not be written" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("room", ["none", "for one"])
def test_a_run_without_its_last_state_says_so_at_its_end(room, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows("sft", tmp_path)
    disk, made = SimpleNamespace(free=1 << 40), StateFolder.begin
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)

    def begin(self, step):
        disk.free = 0  # from the first state on
        if room == "none":
            raise OSError(28, "No space left on device")
        return made(self, step)

    monkeypatch.setattr(StateFolder, "begin", begin)
    how = [*OFTEN, "recover.keep=1", "saver.freq_steps=null"]
    assert go("sft", *how) == 1
    said = capsys.readouterr().err
    assert "error: the run has trained all 7 steps and saved its last checkpoint, but its last state could not" in said
    ending = "trains again from step 2 on" if room == "for one" else "begins again, since there is no state"
    assert said.rstrip().endswith(ending)
    assert (folder_of("sft") / "checkpoints/step-000007").is_dir()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert go("sft", *how) == 0
    assert states() == ["step-000007"]


def test_a_disk_that_does_not_answer_is_told(tmp_path, caplog):
    engine = FakeEngine()
    (tmp_path / "state").mkdir()
    slow, quick = (
        StateWriter(RecoverConfig(), StateFolder(tmp_path / "state", 2), lambda: engine, lambda: None, slow_s=slow_s)
        for slow_s in (0.01, 600.0)
    )
    assert slow.begin_write(1, {})
    until(lambda: bool(caplog.text))
    assert "the state of step 1 has been in progress for 0 s: the disk of" in caplog.text
    slow.poll(wait=True)
    caplog.clear()
    assert quick.begin_write(2, {})
    alarm = quick._write.alarm
    quick.poll(wait=True)
    alarm.join(60)
    assert not alarm.is_alive(), "it was written in time"
    assert not caplog.text


@pytest.mark.parametrize("place", ["rename", "atomic_write_text"])
def test_a_crash_at_the_end_of_writing(writer, place, monkeypatch):
    """Between the renames, and before `latest` is written."""
    states, _, folder = writer
    assert states.write(1, {"run": "before"})

    class Crash(BaseException):
        pass

    def crash(*args):
        raise Crash

    with monkeypatch.context() as patch:
        if place == "rename":
            rename = Path.rename
            patch.setattr(Path, "rename", lambda self, to: crash() if self.name[:4] == ".tmp" else rename(self, to))
        else:
            patch.setattr("areno.run.states.atomic_write_text", crash)
        tmp = states.states.begin_again(1)
        with pytest.raises(Crash):
            states.states.finish(tmp, 1, {"run": "after"})
    after = StateFolder(folder, 2)
    after.clean_up()
    assert names(folder) == ["latest", "step-000001"]
    assert after.newest().record["run"] == ("before" if place == "rename" else "after")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["no_save_optim", "no_load_optim"])
def test_without_the_moments(setting, tmp_path, monkeypatch, tmp_path_factory):
    """The same run up to the first update with moments of zero. Its learning rate is that of the whole run."""
    monkeypatch.chdir(tmp_path)
    stopped_sft(3, tmp_path_factory, *([f"recover.{setting}=true"] if setting == "no_save_optim" else []))
    moments = list(Path().glob("outputs/*/t/state/step-000003/engine/*exp_avg*"))
    assert bool(moments) == (setting == "no_load_optim")
    assert go("sft", *OFTEN, f"recover.{setting}=true") == 0
    found = (whole("sft", tmp_path_factory), kill_runs.left_by(folder_of("sft")))
    steps = [[line for line in of["metrics"] if "train/lr" in line] for of in found]
    for before, after in zip(*steps, strict=True):
        assert before["train/lr"] == after["train/lr"]
        assert (before == after) == (before["step"] < 5)


@pytest.mark.slow
def test_sgd_goes_on_to_the_bit(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path)
    sgd = ["actor.optimizer.type=sgd", "actor.optimizer.lr=0.1"]
    stopped_sft(2, tmp_path_factory, *sgd)
    assert go("sft", *OFTEN, *sgd) == 0
    expected = whole("sft", tmp_path_factory, *sgd)
    assert kill_runs.differences(expected, kill_runs.left_by(folder_of("sft"))) == []


@pytest.mark.slow
def test_another_reference_that_the_user_asked_for(tmp_path, monkeypatch):
    """A changed setting that --resume accepts may name a model of other content."""
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows("dpo", tmp_path)
    shutil.copytree(find_file("examples/quickstart/model"), "first")
    shutil.copytree("first", "second")
    config = json.loads((tmp_path / "second/config.json").read_text())
    (tmp_path / "second/config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    with killed_after(2):
        go("dpo", *OFTEN, "ref.path=first")
    assert go("dpo", "ref.path=second", resume=folder_of("dpo")) == 0
    assert "changed: ref.path" in log()
