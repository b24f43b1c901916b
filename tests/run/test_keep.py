"""Which checkpoints stay: the newest, the best by a metric, and nothing of a crash."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

import areno
from areno.config.datasets import ValidDatasetConfig
from areno.config.models import MicroBatchSpec, ModelConfig
from areno.config.run import SaverConfig
from areno.errors import ConfigError
from areno.run.checkpoints import Saver
from areno.tracking.reader import RunReader
from tests.helpers.row_runs import DEMONSTRATIONS, MODEL, hf_logprobs, optimizer, sft_config

METRIC = "eval/rewards_mean"


def write_model(folder: Path) -> None:
    (folder / "weights").write_text("w")


def saver(folder: Path, **settings: Any) -> Saver:
    made = Saver(SaverConfig(**settings), folder / "checkpoints")
    made.lock_folder(folder)
    return made


def play(made: Saver, values: dict[int, float | None], metric: str = METRIC) -> None:
    """Save these steps, each of which is evaluated afterwards."""
    for step, value in values.items():
        made.save(write_model, step)
        made.record(step, {"eval/accuracy": 0.5} | ({} if value is None else {metric: value}))


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def link(folder: Path, name: str) -> int:
    target = os.readlink(folder / "checkpoints" / name)
    assert (folder / "checkpoints" / name / "weights").exists()
    return int(target.removeprefix("step-"))


def test_the_newest_stay(tmp_path: Path) -> None:
    play(saver(tmp_path, keep=2), {10: 0.1, 20: 0.9, 30: 0.2, 40: 0.3})
    assert steps(tmp_path) == [30, 40]
    assert link(tmp_path, "latest") == 40
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        ".owner",
        "latest",
        "step-000030",
        "step-000040",
    ]


@pytest.mark.parametrize(
    ("settings", "values", "left", "best"),
    [
        ({"keep": 1}, [0.1, 0.9, 0.2, 0.3], [2, 4], 2),
        ({"keep": 1}, [0.1, 0.2, 0.3, 0.4], [4], 4),
        ({"keep": 1, "keep_best": 2}, [0.1, 0.9, 0.2, 0.3, 0.2], [2, 4, 5], 2),
        ({"keep": 2, "keep_best": 2}, [0.9, 0.8, 0.1, 0.1, 0.1], [1, 2, 4, 5], 1),
        ({"keep": 1, "best_mode": "min"}, [0.5, 0.1, 0.2, 0.3], [2, 4], 2),
        ({"keep": 1}, [0.5, 0.9, 0.9, 0.1], [2, 4], 2),  # of equal ones the first
        ({"keep": 1}, [0.5, float("nan"), float("inf"), 0.1], [1, 4], 1),
        ({"keep": 1}, [0.5, None, 0.4, None], [1, 4], 1),
        ({}, [0.1, 0.9, 0.2], [1, 2, 3], 2),
    ],
)
def test_the_best_stay_beside_the_newest(tmp_path: Path, settings, values, left, best) -> None:
    made = saver(tmp_path, best_metric=METRIC, **settings)
    play(made, dict(enumerate(values, 1)))
    assert steps(tmp_path) == left
    assert (link(tmp_path, "best"), link(tmp_path, "latest")) == (best, len(values))
    record = json.loads((tmp_path / "checkpoints/metrics.json").read_text())
    known = [value if value in (0.1, 0.2, 0.3, 0.4, 0.5, 0.8, 0.9) else None for value in values]
    assert record == {
        "best_metric": METRIC,
        "best_mode": settings.get("best_mode", "max"),
        "best_step": best,
        "values": {str(step): value for step, value in enumerate(known, 1)},
    }


def test_a_metric_of_training_is_known_before_the_step_is_saved(tmp_path: Path) -> None:
    made = saver(tmp_path, best_metric="train/loss", keep=1)
    for step, loss in enumerate([3.0, 1.0, 0.1, 2.0], 1):
        made.record(step, {"train/loss": loss})
        if step != 3:  # a step that is not saved is no best checkpoint
            made.save(write_model, step)
    assert steps(tmp_path) == [2, 4]
    assert link(tmp_path, "best") == 2


def test_without_any_value_nothing_is_removed_and_the_name_is_told_once(tmp_path: Path, caplog) -> None:
    made = saver(tmp_path, best_metric="eval/acuracy", keep=1)
    with caplog.at_level(logging.WARNING, "areno"):
        play(made, {1: None, 2: None, 3: None})
        made.wait_for_all()
    assert steps(tmp_path) == [1, 2, 3]
    told = "no step has recorded eval/acuracy, so no checkpoint is the best; did you mean eval/accuracy?"
    assert [record.getMessage() for record in caplog.records] == [f"saver.best_metric: {told}"]


def test_a_resumed_run_keeps_what_it_would_have_kept(tmp_path: Path) -> None:
    """Stopped behind step 2, after having gone on to 5. The values of the steps behind do not count."""
    settings: dict[str, Any] = {"best_metric": METRIC, "keep": 2}
    first = saver(tmp_path, **settings)
    play(first, {1: 0.7, 2: 0.1})
    state = json.loads(json.dumps(first.state_dict()))
    play(first, {3: 0.9, 5: 0.2})
    first.unlock_folder()
    assert steps(tmp_path) == [3, 5]
    resumed = saver(tmp_path, **settings)
    resumed.load_state_dict(state)
    play(resumed, {4: 0.3})
    assert steps(tmp_path) == [4, 5]  # 3 is of the past that did not happen; 5 has not been passed
    play(resumed, {6: 0.2})
    assert steps(tmp_path) == [4, 6]
    assert (link(tmp_path, "best"), link(tmp_path, "latest")) == (4, 6)


def test_a_crash_while_a_checkpoint_is_removed_leaves_it_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    made = saver(tmp_path, keep=1)
    for crash_at in ("rename", "delete"):

        def crash(path: Path) -> None:
            raise KeyboardInterrupt

        made.save(write_model, 1)
        with monkeypatch.context() as patch:
            patch.setattr("areno.files.durable.remove", crash if crash_at == "rename" else _fail_on_second(crash))
            with pytest.raises(KeyboardInterrupt):
                made.save(write_model, 2)
        assert steps(tmp_path) == ([1, 2] if crash_at == "rename" else [2])
        assert link(tmp_path, "latest") == 2
        made.unlock_folder()
        made = saver(tmp_path, keep=1)  # puts in order what the crash left
        assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
        for step in steps(tmp_path):
            assert (tmp_path / f"checkpoints/step-{step:06d}/weights").exists()
        for step in (1, 2):
            made.save(write_model, step)
            assert step in steps(tmp_path)


def _fail_on_second(crash):
    from areno.files.durable import remove

    calls = []

    def remove_or_crash(path: Path) -> None:
        calls.append(path)
        if len([path for path in calls if path.name == ".tmp-step-000001"]) == 2:
            crash(path)
        remove(path)

    return remove_or_crash


def test_what_cannot_be_removed_or_recorded_does_not_end_the_run(tmp_path: Path, monkeypatch, caplog) -> None:
    made = saver(tmp_path, keep=1, best_metric=METRIC)
    play(made, {1: 0.1})

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("atomic_remove", "atomic_write_text"):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "areno"):
            patch.setattr(f"areno.run.checkpoints.{name}", fail)
            play(made, {made.saved_step + 1: 0.2})
        assert "could not be put in order: No space left on device" in caplog.text
        caplog.clear()
    assert steps(tmp_path) == [1, 2, 3]
    play(made, {4: 0.1})
    assert steps(tmp_path) == [2, 4]


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    made = saver(tmp_path, keep=1)
    made.save(write_model, 1)
    for name in ("step-1-mine", "mine", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir()
    made.save(write_model, 2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".owner", "latest", "mine", "step-000002", "step-1-mine", "step-x"]


def test_a_run_that_was_moved_has_its_checkpoints(tmp_path: Path) -> None:
    first = saver(tmp_path / "old", keep=1)
    first.save(write_model, 1)
    first.unlock_folder()
    (tmp_path / "old").rename(tmp_path / "new")
    moved = saver(tmp_path / "new", keep=1)
    moved.load_state_dict(first.state_dict())
    moved.save(write_model, 2)
    assert steps(tmp_path / "new") == [2]


def test_a_run_evaluates_and_compares_each_checkpoint(tmp_path: Path) -> None:
    """At a rate at which the loss of other rows falls and rises again. The best checkpoint has the loss it says."""
    kept = SaverConfig(freq_steps=1, keep=1, best_metric="eval/loss")
    actor = ModelConfig(path=MODEL, gradient_checkpointing=False, optimizer=optimizer(3e-3))
    config = sft_config(tmp_path, MicroBatchSpec(), 4, saver=kept, total_train_steps=3)
    config.actor, config.valid_dataset = actor, ValidDatasetConfig(batch_size=4, max_length=64)
    rows, others = DEMONSTRATIONS[:4], DEMONSTRATIONS[4:]
    with areno.SFTTrainer(config, run_dir=tmp_path / "run", train_dataset=rows, valid_dataset=others) as trainer:
        trainer.fit()
    losses = RunReader(tmp_path / "run").series("eval/loss")
    record = json.loads((tmp_path / "run/checkpoints/metrics.json").read_text())
    assert record["values"] == {str(step): loss for step, loss in zip(*losses, strict=True)}
    assert losses.steps == [1, 2, 3]
    best = min(zip(losses.values, losses.steps, strict=True))
    assert best[1] == 2
    assert steps(tmp_path / "run") == [2, 3]
    folder = tmp_path / "run/checkpoints/best"
    logprobs = [value for row in others for value in hf_logprobs(folder, row["prompt"], row["response"])]
    assert -sum(logprobs) / len(logprobs) == pytest.approx(best[0], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"keep": 2, "keep_best": 2},
            "keep_best: is 2, but best_metric is null, so checkpoints are not compared; set best_metric",
        ),
        (
            {"best_mode": "min"},
            "best_mode: is min, but best_metric is null, so checkpoints are not compared; set best_metric",
        ),
        (
            {"best_metric": METRIC, "keep_best": 2},
            "keep_best: is 2, but keep is null, so no checkpoint is removed; set keep",
        ),
        ({"keep": 0}, "keep: is 0; it must be more than 0"),
        (
            {"hub_private": False},
            "hub_private: is false, but push_to_hub is null, so nothing is uploaded; set push_to_hub",
        ),
    ],
)
def test_settings_that_do_nothing_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError) as raised:
        SaverConfig(**settings)
    assert str(raised.value).removesuffix(", or leave this out") == message
