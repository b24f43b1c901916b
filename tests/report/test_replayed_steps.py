"""The flight recorder and areno replay --step: a recorded step, computed again, has the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areno.report.replayed_steps import RecordedRun, replay_steps
from areno.tracking.reader import RunReader
from tests import kill_runs
from tests.helpers.resumed import folder_of, go, killed_after

slow = pytest.mark.slow
OFTEN = "recover.freq_steps=3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded_run(recipe: str, *settings: str) -> RunReader:
    kill_runs.write_rows(recipe, Path())
    assert go(recipe, *settings) == 0
    return RunReader(folder_of(recipe))


def check_steps(run: RunReader, *steps: int) -> None:
    for step in steps:
        base, found = replay_steps(run, step, "cpu")
        assert [each.step for each in found] == list(range(base.step + 1, step + 1))
        for each in found:
            assert each.n_compared > 10
            assert each.differences == []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("sft", []),
        pytest.param("gspo", [], marks=slow),
        pytest.param("gspo", ["rollout.dynamic_sampling=false", "actor.kl_ctl=0.01", "ref=default"], marks=slow),
        pytest.param("grpo", [], marks=slow),
        pytest.param("grpo", ["rollout.dynamic_sampling=false"], marks=slow),
        pytest.param("ppo", [], marks=slow),
        pytest.param("online_dpo", [], marks=slow),
        pytest.param("dpo", [], marks=slow),
        pytest.param("kto", [], marks=slow),
        pytest.param("prm", [], marks=slow),
        pytest.param("rw", [], marks=slow),
    ],
)
def test_every_bit_of_a_step_is_equal(recipe: str, settings: list[str], folder: Path) -> None:
    run = recorded_run(recipe, OFTEN, *settings)
    before = contents(run.path)
    check_steps(run, 2, 5, 7)
    assert contents(run.path) == before
