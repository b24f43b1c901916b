"""python -m benchmarks grid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areno.bench.areno_contender import ArenoContender
from areno.errors import EngineError
from benchmarks import grid
from benchmarks.__main__ import main

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
    points = {name: each for name, each in of.items() if isinstance(each, dict)}
    first, *names, last = points
    assert first.startswith("tune: 8 at once, ")
    assert last == "tune: further steps"
    assert len(names) == 8
    assert {"8 at once, 64 tokens, recomputed", "4 at once, 4,096 tokens, kept"} <= {*names}
    for name, point in points.items():
        if name != last:  # other lengths in each step
            assert point["step_s"] == pytest.approx(point["rollout_s"] + point["train_s"])
        assert point["peak_gib"] > 0
    assert of["ratio"] == pytest.approx(
        points[first]["step_s"] / min(points[name]["step_s"] for name in [first, *names])
    )
    assert of["tune_s"] > 0


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
    failed = [line for line in lines if "out of device memory in training: lower it" in line]
    assert len(failed) == 4
    assert all("64 tokens" in line for line in failed)
    assert len(made) > 4  # a new engine after each failure
    assert lines[-1].startswith("ratio ")


@pytest.mark.gpu
def test_a_small_model_on_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = "grid --shape 25m --device cuda:0 --prompts 16 --samples 4 --repeats 1 --steps 2 --json"
    assert main(command.split()) == 0
    of = json.loads(capsys.readouterr().out)
    assert of["tune_s"] < 90
    assert "failed" not in of["tune: further steps"]
    assert of["ratio"] >= 1
