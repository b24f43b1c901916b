"""Checkpoints that are written while the next step runs: whole or absent, of the weights as they were, never lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import areno.models.saving
from areno.config.run import EvaluatorConfig, SaverConfig
from areno.engine.engine import Engine
from areno.errors import CheckpointError
from areno.loss_fns.sft import sft_loss_fn
from areno.run.checkpoints import SavedModels, Saver
from areno.types import TrainSequence
from tests.helpers.policy_runs import classifier, play
from tests.helpers.processes import worker_of
from tests.helpers.started_runs import start
from tests.helpers.tiny_engine import model_folder, saved_tensors, spec, wait_saved

ROWS = [TrainSequence([True, False, False], [3, 4, 5])] * 2


class Disk:
    """A stand-in for what writes in the background: slow, and perhaps full."""

    def __init__(self) -> None:
        self.written: bool | Exception = False
        self.folders: list[Path] = []

    def write(self, folder: Path) -> None:
        self.written = False
        self.folders.append(folder)
        (folder / "half").write_text("x")

    def is_written(self) -> bool:
        if isinstance(self.written, Exception):
            raise self.written
        return self.written


def saver(folder: Path, disk: Disk, **settings: Any) -> Saver:
    made = Saver(SaverConfig(**{"mode": "async", **settings}), folder / "checkpoints", disk.is_written)
    made.lock_folder(folder)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_has_its_name_when_all_of_it_is_written(tmp_path: Path) -> None:
    disk = Disk()
    made = saver(tmp_path, disk)
    made.save(disk.write, 1)
    assert not made.poll()
    assert names(tmp_path) == [".owner", ".tmp-step-000001"]
    assert made.has_checkpoint(1)
    assert made.saved_step is None
    disk.written = True
    assert made.poll()
    assert names(tmp_path) == [".owner", "latest", "step-000001"]
    assert made.saved_step == 1


def test_auto_is_async_on_cuda_and_sync_on_a_cpu(tmp_path: Path) -> None:
    disk = Disk()
    made = saver(tmp_path, disk, mode="auto")
    made.save(disk.write, 1)
    assert names(tmp_path) == [".owner", ".tmp-step-000001"]
    disk.written = True
    made.save(lambda folder: None, 2)
    assert names(tmp_path) == [".owner", "latest", "step-000001", "step-000002"], "as all of it is there already"
    models, calls = SavedModels(cast("Any", SimpleNamespace(saver=SaverConfig(mode="auto"))), ()), []
    for device in ("cpu", "cuda:0"):
        engine = SimpleNamespace(spec=SimpleNamespace(devices=[device]))
        write = {"write_checkpoint": lambda folder, **how: calls.append(how)}
        models.trainer = cast("Any", SimpleNamespace(engine=engine, **write))
        models.write_checkpoint(tmp_path)
    assert [how["background"] for how in calls] == [False, True]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    disk = Disk()
    made = saver(tmp_path, disk, keep=1)
    made.save(disk.write, 1)
    timer = threading.Timer(0.2, setattr, (disk, "written", True))
    timer.start()
    made.save(disk.write, 2)
    assert names(tmp_path) == [".owner", ".tmp-step-000002", "latest", "step-000001"]
    disk.written = True
    made.wait_for_all()
    assert names(tmp_path) == [".owner", "latest", "step-000002"]


def test_an_error_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    disk = Disk()
    made = saver(tmp_path, disk)
    made.save(disk.write, 1)
    disk.written = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CheckpointError, match=r"saver\.path: .*cannot hold the checkpoint: No space left on device"):
        made.poll()
    assert names(tmp_path) == [".owner"]
    assert made.poll()
    made.unlock_folder()
    assert not (tmp_path / "checkpoints").exists()


def test_what_is_under_way_is_dropped_when_the_run_goes_back_to_a_state(tmp_path: Path) -> None:
    """As after a lost worker: whoever writes now knows nothing of that checkpoint."""
    disk = Disk()
    made = saver(tmp_path, disk)
    state = made.state_dict()
    made.save(disk.write, 1)
    made.load_state_dict(state)
    disk.written = True
    assert made.poll()
    assert names(tmp_path) == [".owner"]
    assert not made.has_checkpoint(1)


def test_a_run_tells_at_its_next_step_that_a_checkpoint_was_lost(tmp_path: Path) -> None:
    disk = Disk()
    run = start(tmp_path, saver=SaverConfig(mode="async", freq_steps=1), save=disk.write, is_saved=disk.is_written)
    steps = run.steps()
    next(steps)
    run.end_step({})
    disk.written = CheckpointError("cannot write the model: disk full")
    next(steps)
    with pytest.raises(CheckpointError, match="disk full"):
        run.end_step({})
    run.close()
    log = (tmp_path / "logs/run.log").read_text()
    assert "stopped in step 2; there is no state to go on from, and no checkpoint" in log
    assert not list(tmp_path.rglob("*step-*"))


def test_the_end_of_a_run_waits_and_an_early_end_drops(tmp_path: Path) -> None:
    for name, ends in (("whole", True), ("stopped", False)):
        disk = Disk()
        settings = SaverConfig(mode="async", freq_steps=2)
        run = start(tmp_path / name, saver=settings, save=disk.write, is_saved=disk.is_written, total_train_epochs=1)
        for _ in run.steps():
            run.end_step({})
        if ends:
            timer = threading.Timer(0.2, setattr, (disk, "written", True))
            timer.start()
            run.finish({})
        run.close()
        assert names(tmp_path / name) == [".owner", "latest", "step-000002"] if ends else True
    assert not (tmp_path / "stopped/checkpoints").exists()


def test_a_resumed_run_saves_again_what_was_under_way(tmp_path: Path) -> None:
    """Its value is known. One that was finished after the state was taken is not written again."""
    settings: dict[str, Any] = {
        "saver": SaverConfig(mode="async", freq_steps=2, best_metric="eval/loss", best_mode="max", keep=1),
        "evaluator": EvaluatorConfig(freq_steps=3),
        "total_train_epochs": 2,
    }
    for finished in (False, True):
        folder, disk = tmp_path / str(finished), Disk()
        run = start(folder, save=disk.write, is_saved=disk.is_written, evaluate=lambda: {"loss": 0.5}, **settings)
        for _ in run.steps():
            run.end_step({})
            if run.step == 2:
                break
        state = json.loads(json.dumps(run.state_dict()))
        disk.written = finished
        run.saver.poll()
        run.close()
        assert (folder / "checkpoints/step-000002").exists() == finished
        disk = Disk()
        run = start(folder, save=disk.write, is_saved=disk.is_written, evaluate=lambda: {"loss": 0.4}, **settings)
        run.load_state_dict(state)
        for _ in run.steps():
            disk.written = True
            run.end_step({})
        disk.written = True
        run.finish({})
        run.close()
        assert [path.name for path in disk.folders] == [f".tmp-step-00000{step}" for step in (2, 4)[finished:]]
        assert names(folder) == [".owner", "best", "latest", "metrics.json", "step-000002", "step-000004"]
        assert json.loads((folder / "checkpoints/metrics.json").read_text())["values"] == {"2": 0.5, "4": 0.4}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No weights reach the disk until it is set."""
    opened, save_file = threading.Event(), areno.models.saving.save_file

    def wait_and_save(*args: Any, **how: Any) -> None:
        assert opened.wait(30)
        save_file(*args, **how)

    monkeypatch.setattr(areno.models.saving, "save_file", wait_and_save)
    yield opened
    opened.set()


def test_an_update_behind_the_save_does_not_change_what_is_written(tmp_path: Path, gate: threading.Event) -> None:
    with Engine(spec(model_folder(tmp_path / "model")), "inline") as engine:
        engine.save(str(tmp_path / "background"), background=True)
        engine.train(ROWS, sft_loss_fn)
        assert not engine.is_saved()
        gate.set()
        engine.save(str(tmp_path / "after"))
        wait_saved(engine)
    with Engine(spec(tmp_path / "model"), "inline") as engine:
        engine.save(str(tmp_path / "before"))
    before, background, after = (saved_tensors(tmp_path / name) for name in ("before", "background", "after"))
    assert before.keys() == background.keys()
    assert all(torch.equal(before[name], background[name]) for name in before)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_a_full_disk_in_the_background_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Engine(spec(model_folder(tmp_path / "model")), "inline") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(areno.models.saving, "save_file", full)
            engine.save(str(tmp_path / "lost"), background=True)
            with pytest.raises(CheckpointError, match=r"cannot write the model to .*lost: .*No space.*saver\.path"):
                wait_saved(engine)
        assert engine.is_saved()
        engine.save(str(tmp_path / "kept"), background=True)
        wait_saved(engine)
    assert saved_tensors(tmp_path / "kept")


def test_a_closed_engine_writes_no_more(tmp_path: Path, gate: threading.Event) -> None:
    with Engine(spec(model_folder(tmp_path / "model")), "inline") as engine:
        for name in ("first", "second"):
            engine.save(str(tmp_path / name), background=True)
        worker_of(engine).saver.unfinished[1].add_done_callback(lambda _: gate.set())  # cancelled
    assert (tmp_path / "first/model.safetensors").exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.slow
def test_a_run_saves_the_same_in_both_modes(tmp_path: Path) -> None:
    critic = classifier(tmp_path / "critic", seed=2)
    settings = ["saver.freq_steps=1", f"critic.path={critic}", "actor.kl_ctl=0", "ref=null"]
    settings += ["saver.keep=2", "saver.best_metric=rollout/rewards_mean", "total_train_steps=3"]
    settings += ["reward.fn=null", f"reward.path={classifier(tmp_path / 'reward')}"]
    for mode in ("sync", "async"):
        play("ppo", tmp_path / mode, *settings, f"saver.mode={mode}", task="quickstart_ppo")
    one, two = (tmp_path / mode / "checkpoints" for mode in ("sync", "async"))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file() and path.name != ".owner")
    assert files == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file() and path.name != ".owner")
    assert Path("latest/critic/model.safetensors") in {path.relative_to(one) for path in one.glob("*/critic/*")}
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    values = json.loads((one / "metrics.json").read_text())["values"]
    kept = {*sorted(values, key=int)[-2:], max(values, key=lambda step: values[step])}
    assert {path.name for path in one.glob("step-*")} == {f"step-{int(step):06d}" for step in kept}


def test_killed_in_the_background(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from areno.run.checkpoints import Saver
from areno.config.run import SaverConfig
saver = Saver(SaverConfig(mode="async", keep=1), {str(tmp_path)!r}, lambda: saver.saved_step is None)
saver.lock_folder(Path("one"))
for step in (1, 2):
    saver.save(lambda folder: (folder / "weights").write_text("x"), step)
print(saver.poll(), flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        process.send_signal(signal.SIGKILL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".owner", ".tmp-step-000002", "latest", "step-000001"]
    again = Saver(SaverConfig(), tmp_path)
    again.lock_folder(Path(__file__).parents[2] / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".owner", "latest", "step-000001"]
    assert os.readlink(tmp_path / "latest") == "step-000001"
