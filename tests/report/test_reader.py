"""What runs left in their folders is read back, also while they go on; damage is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from areno.api.metrics import MetricsRecorder
from areno.config.datasets import DatasetConfig
from areno.config.models import ModelConfig
from areno.config.run import SaverConfig
from areno.errors import ArenoError
from areno.recipes.sft import SFTConfig
from areno.tracking import run_folder
from areno.tracking.reader import RunReader, list_runs

CONFIG = SFTConfig(
    experiment_name="e", actor=ModelConfig(path="model"), train_dataset=DatasetConfig(path="rows.jsonl", batch_size=3)
)


@pytest.fixture
def folder(tmp_path):
    """A run of two steps."""
    folder = tmp_path / "e" / "t"
    run_folder.make_run_folder(folder).write_description(CONFIG, ["seed=1", "note='${x}: - y'"])
    with MetricsRecorder(None, folder / "logs/metrics.jsonl") as recorder:
        recorder.record(1, {"train/loss": 2.0})
        recorder.record(1, {"eval/loss": math.inf})
        recorder.record(2, {"train/loss": 1.0})
    return folder


def test_settings(folder):
    run = RunReader(folder)
    assert run.config["train_dataset"]["batch_size"] == 3
    assert "defaults" not in run.config
    assert run.overrides == ["seed=1", "note='${x}: - y'"]
    assert run.versions["areno"]
    assert run.sweep is None


def test_scalars(folder):
    run = RunReader(str(folder))
    assert run.series("train/loss") == ([1, 2], [2.0, 1.0])
    assert run.metrics().keys() == {"train/loss", "eval/loss"}
    assert math.isnan(run.steps()[1]["eval/loss"])
    assert run.steps()[2] == {"train/loss": 1.0}
    assert [record["step"] for record in run.records()] == [1, 1, 2]
    with pytest.raises(ArenoError, match="has no scalar train/los; it has eval/loss, train/loss"):
        run.series("train/los")


def test_a_run_that_has_just_started(tmp_path):
    run_folder.make_run_folder(tmp_path / "run").write_description(CONFIG, [])
    run = RunReader(tmp_path / "run")
    assert (run.overrides, run.metrics(), run.checkpoints(), run.sampled_steps()) == ([], {}, {}, [])
    assert run.latest_checkpoint() is run.status() is None


def test_the_last_line_of_a_run_that_goes_on_may_be_torn(folder):
    with (folder / "logs/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train')
    assert RunReader(folder).series("train/loss").steps == [1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"step": 3, "tr', "is not JSON"),
        (b"3", "not a JSON object"),
        (b"{}", "has no step"),
        (b"\xff", "not JSON"),
    ],
)
def test_other_damage_is_named(folder, line, message):
    path = folder / "logs/metrics.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n" + b'{"step": 4}\n')
    with pytest.raises(ArenoError, match=rf"logs/metrics.jsonl, line 4: .*{message}"):
        RunReader(folder).metrics()


def test_damaged_settings_are_named(folder):
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(ArenoError, match=r"config.yaml cannot be read: "):
        _ = RunReader(folder).config


def test_samples(folder, caplog):
    (folder / "rollouts").mkdir()
    (folder / "rollouts/000010.jsonl").write_text('{"reward": 1.0}\n{"reward": null}\n')
    (folder / "rollouts/000009.jsonl").write_text('{"reward": 0.5}\n{"rew')
    run = RunReader(folder)
    assert run.sampled_steps() == [9, 10]
    assert run.samples(10) == [{"reward": 1.0}, {"reward": None}]
    assert run.samples(9) == [{"reward": 0.5}]
    assert caplog.messages == [f"{folder}/rollouts/000009.jsonl ends in half a line, which is left out"]
    (folder / "rollouts/000009.jsonl").write_text('{"rew\n{"reward": 0.5}')
    with pytest.raises(ArenoError, match=r"000009.jsonl, line 1: is not JSON"):
        run.samples(9)
    with pytest.raises(ArenoError, match="has no samples of step 3"):
        run.samples(3)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_checkpoints(tmp_path, elsewhere):
    place = tmp_path / ("mine" if elsewhere else "run/checkpoints")
    config = replace(CONFIG, saver=SaverConfig(path=str(place) if elsewhere else None))
    run_folder.make_run_folder(tmp_path / "run").write_description(config, [])
    for name in ("step-000002", "step-1000000", ".tmp-step-000003", "step-probe"):
        (place / name).mkdir(parents=True)
    run = RunReader(tmp_path / "run")
    assert run.checkpoints() == {2: place / "step-000002", 1000000: place / "step-1000000"}
    assert run.latest_checkpoint() == place / "step-1000000"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["epoch=0 stage=epoch_start", "step=1 loss=2 seconds=3"], "unfinished"),
        (["epoch=0 stage=epoch_start", "done: 2 steps in 3 s; loss 2.000 -> 1.000"], "completed"),
        (["epoch=0 stage=epoch_start", "warning: stopped in step 2; there is no state"], "stopped"),
        (["warning: stopped in step 2; there is no state", "epoch=0 stage=epoch_start"], "unfinished"),
        (["model: 1.0M parameters", "  completion: done: x"], None),
    ],
)
def test_status(folder, lines, status):
    (folder / "logs/run.log").write_text("".join(f"12:00:00 {line}\n" for line in lines))
    assert RunReader(folder).status() == status


def test_folders_that_are_no_runs(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/multirun.yaml").touch()
    for path, message in (
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path, "is not the folder of a run: it has neither config.yaml and versions.json nor logs/metrics.jsonl"),
        (tmp_path / "sweep", "holds the runs of a sweep; read one of them, such as .*sweep/0"),
    ):
        with pytest.raises(ArenoError, match=message):
            RunReader(path)


def test_all_runs_below_a_folder(folder):
    root = folder.parents[1]
    sweep = root / "e" / "sweep"
    for number in (0, 2, 10):
        run_folder.make_run_folder(sweep / str(number)).write_description(CONFIG, [])
    (sweep / "multirun.yaml").touch()
    (root / "empty").mkdir()
    runs = list_runs(root)
    assert [run.path.relative_to(root).as_posix() for run in runs] == ["e/sweep/0", "e/sweep/2", "e/sweep/10", "e/t"]
    assert [run.sweep for run in runs] == [sweep, sweep, sweep, None]
    assert [run.path for run in list_runs(folder)] == [folder]
    with pytest.raises(ArenoError, match="nowhere does not exist"):
        list_runs(root / "nowhere")
