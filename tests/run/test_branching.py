"""--resume RUN --from-step S: a run that goes on from a step of another run, in a folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from areno.report.replayed_steps import replay_steps
from areno.run.recorded_run import RecordedRun
from areno.tracking.reader import RunReader
from tests import kill_runs
from tests.helpers.recipe_runs import without_times
from tests.helpers.resumed import folder_of, go


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def first_run(recipe: str) -> Path:
    kill_runs.write_rows(recipe, Path())
    assert go(recipe, "recover.freq_steps=3", "recover.keep=1") == 0
    return folder_of(recipe)


def digests(run: Path) -> dict[int, dict[str, list[int]]]:
    recorded = RecordedRun(run)
    return {
        step: {name: parts.tolist() for name, parts in recorded.read(step)["digests"].items()}
        for step in recorded.records.steps()
    }


@pytest.mark.parametrize(
    ("recipe", "step"),
    [
        ("sft", 5),
        pytest.param("gspo", 3, marks=pytest.mark.slow),
        pytest.param("gspo", 4, marks=pytest.mark.slow),
        pytest.param("grpo", 4, marks=pytest.mark.slow),  # samples of several steps are in flight
        pytest.param("grpo", 2, marks=pytest.mark.slow),
        pytest.param("ppo", 5, marks=pytest.mark.slow),
    ],
)
def test_without_a_change_it_is_the_same_run(recipe: str, step: int, folder: Path) -> None:
    old = first_run(recipe)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert go(recipe, f"--from-step={step}", "recover.keep=2", resume=old) == 0
    new = folder_of(recipe, f"t-from-{step}")
    assert without_times(new) == without_times(old)
    there = digests(old)
    assert digests(new) == {number: found for number, found in there.items() if number > step}
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    base, [*_, last] = replay_steps(RunReader(new), max(there), "cpu")
    assert base.step >= step
    assert last.differences == []


def test_it_may_have_a_name_and_other_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = first_run("sft")
    assert go("sft", "--from-step=3", "trial_name=slower", "actor.optimizer.lr=1e-5", resume=old) == 0
    assert "outputs/quickstart_base/slower goes on after step 3 of outputs/quickstart_base/t" in capsys.readouterr().out
    run = RunReader(folder_of("sft", "slower"))
    assert run.config["trial_name"] == "slower"
    rates = run.series("train/lr").values
    assert rates[:3] == RunReader(old).series("train/lr").values[:3]
    assert max(rates[3:]) < min(rates[:3])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from-step=0"], "--from-step: is 0; the number of a finished step is expected"),
        (["--from-step=9"], "--from-step: is 9, but there is no state of this step, and it cannot be computed again: "),
        (["--from-step=3", "seed=7"], "seed: the run in "),
        (["--from-step=3", "trial_name=t"], "trial_name: "),
        (["--from-step=3", "actor.nothing=1"], "actor.nothing: unknown key"),
    ],
)
def test_what_cannot_go_on_leaves_nothing(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = first_run("sft")
    before = sorted(old.parent.rglob("*"))
    capsys.readouterr()
    assert go("sft", *words, resume=old) == 2
    assert message in capsys.readouterr().err
    assert sorted(old.parent.rglob("*")) == before


def test_it_needs_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go("sft", "--from-step=3") == 2
    assert "--from-step: needs the run that it is a step of; add --resume RUN" in capsys.readouterr().err


def test_a_step_whose_records_are_gone_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = first_run("sft")
    shutil.rmtree(old / "recorder")
    assert go("sft", "--from-step=2", resume=old) == 2
    assert "has no records: recorder.max_gib was 0" in capsys.readouterr().err
