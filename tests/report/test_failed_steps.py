"""A step that ends a run with an error has a record, and areno replay ends with the same error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from areno.cli.__main__ import main
from areno.engine.engine import Engine
from areno.report.replayed_steps import replay_steps
from areno.run.recorded_run import RecordedRun
from areno.tracking.reader import RunReader
from tests import kill_runs
from tests.helpers.resumed import folder_of, go

ONCE = "actor.max_skipped_steps=1"


def failed_run(recipe: str, *settings: str) -> RecordedRun:
    kill_runs.write_rows(recipe, Path())
    assert go(recipe, *settings) == 1
    return RecordedRun(folder_of(recipe))


def replayed(recorded: RecordedRun, step: int) -> Any:
    _, steps = replay_steps(RunReader(recorded.path), step, "cpu")
    return steps[-1]


def test_an_update_that_is_not_finite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = failed_run("sft", "actor.optimizer.lr=1e30", ONCE, "actor.optimizer.gradient_clipping=0")
    last = max(recorded.records.steps())
    record = recorded.read(last)
    assert record["error"].startswith("EngineError: the updates of 1 steps in a row were not applied")
    assert record["updates"][0]["role"] == "actor"
    assert not math.isfinite(record["metrics"]["train/grad_norm"]) or math.isnan(record["metrics"]["train/loss"])
    assert f"step {last} is recorded up to its error" in (recorded.path / "logs/run.log").read_text()
    capsys.readouterr()
    assert main(["replay", str(recorded.path), "--step", str(last), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"In the run, the step ended with {record['error']}\nIt did so here, too." in said
    assert "results of the step, up to its error." in said
    assert main(["replay", str(recorded.path)]) == 0
    assert f"Step {last} ended the run with EngineError" in capsys.readouterr().out
    assert main(["replay", str(recorded.path), "--step", str(last), "--change", "actor.optimizer.lr=1e-3"]) == 1
    assert f"step {last} ended the run with an error (EngineError" in capsys.readouterr().err
    assert go("sft", "--from-step", str(last), "trial_name=other", resume=recorded.path) == 2
    assert "this step ended the run with an error" in capsys.readouterr().err


def test_rewards_that_all_fail(folder: Path) -> None:
    code = "def reward_fn(record):\n    return len(record.completion) / (0 if record.step == 3 else 1)\n"
    (folder / "failing.py").write_text(code)
    kill_runs.write_rows("gspo", Path())
    settings = [f"reward.fn={folder / 'failing.py'}", ONCE, "rollout.dynamic_sampling=false"]
    assert go("gspo", *settings, "evaluator.freq_steps=50") == 1
    recorded = RecordedRun(folder_of("gspo"))
    assert recorded.records.steps() == [1, 2, 3]
    assert recorded.read(2).get("error") is None
    record = recorded.read(3)
    assert record["error"].startswith("ArenoError: reward.fn: no reward could be computed for any sample of a step")
    statuses = {sample["outcome"].status for sample in record["rollout"]["samples"]}
    assert statuses == {"error"}
    (folder / "failing.py").unlink()  # the recorded outcomes count
    found = replayed(recorded, 3)
    assert found.is_equal
    assert found.error.startswith("ArenoError: reward.fn: no reward")


def test_an_error_before_the_samples_are_there(folder: Path) -> None:
    """The weights are no numbers any more, so the rollout of the next step fails; a replay samples again."""
    settings = ("rollout.dynamic_sampling=false", "actor.optimizer.gradient_clipping=0", "evaluator.freq_steps=50")
    recorded = failed_run("gspo", "actor.optimizer.lr=1e30", *settings)
    last = max(recorded.records.steps())
    record = recorded.read(last)
    assert record["rollout"] is None
    assert "non-finite logits" in record["error"]
    assert replayed(recorded, last).is_equal


def test_an_error_of_the_training_code_that_does_not_come_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, calls = Engine.train, []

    def failing(self: Engine, *args: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a cosmic ray")
        return train(self, *args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "train", failing)
        kill_runs.write_rows("sft", Path())
        assert go("sft") == 1
    recorded = RecordedRun(folder_of("sft"))
    assert recorded.read(3)["error"] == "RuntimeError: a cosmic ray"
    assert len(recorded.read(3)["updates"]) == 1
    capsys.readouterr()
    assert main(["replay", str(recorded.path), "--step", "3", "--device", "cpu"]) == 1
    assert "ended with RuntimeError: a cosmic ray\nHere, it ended with no error" in capsys.readouterr().out
    assert go("sft", resume=recorded.path) == 0
    assert recorded.records.steps() == list(range(1, 8))
    assert RecordedRun(recorded.path).error_of(3) is None, "the run has repeated the step"
