"""python -m areno.bench grid."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from areno.bench import grid
from areno.bench.__main__ import main
from areno.bench.areno_contender import ArenoContender
from areno.errors import EngineError

TINY = "grid --shape tiny --device cpu --prompts 2 --samples 4 --prompt-len 16 --new-tokens 8 --repeats 1"


@pytest.fixture(autouse=True)
def quickly_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.run.tuning.shortlist", lambda found: found[:1])
    monkeypatch.setattr(grid, "BUDGETS", (64, 4096))


def found(capsys: pytest.CaptureFixture[str], arguments: str = "") -> dict[str, Any]:
    assert main([*TINY.split(), *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_choice_is_compared_with_each_point(capsys: pytest.CaptureFixture[str]) -> None:
    of = found(capsys, "--steps 2")
    names = [point["name"] for point in of["points"]]
    assert len(names) == 1 + 8
    assert names[0].startswith("tune: 8 at once, ")
    assert {"8 at once, 64 tokens, recomputed", "4 at once, 4,096 tokens, kept"} <= {*names}
    for point in of["points"]:
        assert point["step_s"] == pytest.approx(point["rollout_s"] + point["train_s"])
        assert point["peak_gib"] > 0
    assert of["ratio"] == pytest.approx(of["points"][0]["step_s"] / min(point["step_s"] for point in of["points"]))
    assert of["tune_s"] > 0
    assert (of["steps"], of["steps_failed"]) == (2, "")


@pytest.mark.slow
def test_a_point_that_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train, made = ArenoContender.train, []

    def run_out(ours: ArenoContender, rows: Any) -> dict[str, float]:
        if ours not in made:
            made.append(ours)
        if ours.engine.spec.mb_spec.max_tokens_per_mb == 64:
            raise EngineError("out of device memory in training: lower it")
        return train(ours, rows)

    monkeypatch.setattr(ArenoContender, "train", run_out)
    assert main(TINY.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.endswith("out of device memory in training: lower it")]
    assert len(failed) == 4
    assert all("64 tokens" in line for line in failed)
    assert len(made) > 4  # a new engine after each failure
    assert lines[-1].endswith("times as long as with the best point")


@pytest.mark.slow
def test_points_after_the_limit_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = grid.choose

    def slowly(*given: Any) -> Any:
        time.sleep(1)  # a fast machine measures several points in the second of the limit
        return choose(*given)

    monkeypatch.setattr(grid, "choose", slowly)
    chosen, *others = found(capsys, "--limit-s 1")["points"]
    assert chosen["step_s"] > 0
    assert {point["failed"] for point in others} == {"not measured, see --limit-s"}


@pytest.mark.parametrize(("option", "works"), [("--steps", "grid and trl"), ("--limit-s", "grid")])
def test_options_of_other_works(option: str, works: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", option, "2", "--device", "cpu"]) == 2
    assert f"{option}: is for {works}, not for train" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_small_model_on_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = "grid --shape 25m --device cuda:0 --prompts 16 --samples 4 --repeats 1 --steps 2 --json"
    assert main(command.split()) == 0
    of = json.loads(capsys.readouterr().out)
    assert of["tune_s"] < 90
    assert of["steps_failed"] == ""
    assert of["ratio"] >= 1
