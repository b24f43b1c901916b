"""The result of a check goes with the run that was checked, and says what another run has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.cli.__main__ import main
from areno.launch.command import run
from areno.recipes import dpo
from areno.report.page import page_contents
from areno.tracking.reader import RunReader


def settings(folder: Path, trial: str, *more: str) -> list[str]:
    task = ["--config-name=quickstart_dpo", f"cluster.fileroot={folder}", f"trial_name={trial}", "valid_dataset=null"]
    return [*task, "total_train_steps=1", "stats_logger.console=quiet", "engine.device=cpu", *more]


def train(folder: Path, trial: str, *more: str) -> RunReader:
    assert run(dpo.ALGORITHM, "python -m areno.recipes.dpo", settings(folder, trial, *more)) == 0
    return RunReader(folder / "quickstart_dpo" / trial)


def test_a_run_has_the_result_of_its_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "before").check() is None
    command = ["python", "-m", "areno.recipes.dpo", *settings(tmp_path, "same")]
    assert main(["check", "--only", "data", "--", *command]) == 0
    same, other = train(tmp_path, "same"), train(tmp_path, "other", "seed=4")
    found = same.check()
    assert found is not None
    assert found["differs"] == []
    assert {finding["name"] for finding in found["findings"]} >= {"answers", "turn-end"}
    changed = other.check()
    assert changed is not None
    assert changed["differs"] == ["settings"]
    runs = page_contents([same, other])["runs"]
    assert [each["check"]["differs"] for each in runs] == [[], ["settings"]]


def test_changed_code_of_the_user_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = tmp_path / "loader.py"
    row = "{'prompt': f'{n}+1=', 'chosen': str(n + 1), 'rejected': '0'}"
    text = f"def load_dataset(split):\n    return [{row} for n in range(40)]\n"
    loader.write_text(text)
    more = (f"train_dataset.loader={loader}",)
    command = ["python", "-m", "areno.recipes.dpo", *settings(tmp_path, "a", *more)]
    assert main(["check", "--only", "data", "--", *command]) == 0
    loader.write_text(text.replace("'0'", "'00'"))
    found = train(tmp_path, "a", *more).check()
    assert found is not None
    assert found["differs"] == ["code", "train_dataset"]
