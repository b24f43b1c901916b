"""Tables of runs in the terminal: the list of runs, their differences, and the end of a run."""

from __future__ import annotations

import io
import json
import time

import pytest
from rich.console import Console

from areno.errors import ArenoError
from areno.report.page import page_contents
from areno.report.runs import runs_table
from areno.report.tables import compare_tables
from areno.tracking.display.display import make_end_table
from areno.tracking.reader import RunReader, duration_text
from tests.helpers.made_up_runs import make_run


def told(table) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables(tmp_path):
    runs = [make_run(tmp_path, name, seed, 5 + seed) for seed, name in enumerate("ab")]
    listed = told(runs_table(tmp_path))
    assert "reward 0.6 at step 6" in listed
    assert "0:12" in listed
    settings, results = map(told, compare_tables(runs))
    assert "seed" in settings
    assert "actor" not in settings
    assert "0.6" in results
    assert duration_text(3723.4) == "1:02:03"
    with pytest.raises(ArenoError, match="there is no run below"):
        runs_table(tmp_path / "a" / "logs")


def test_equal_numbers_are_one_row_of_the_table_at_the_end(tmp_path):
    logs = make_run(tmp_path, "a", 0, 1) / "logs"
    lines = [
        {"step": step, "time": float(step), "eval/accuracy": value, "eval/rewards_mean": value, "eval/loss": 1 - value}
        for step, value in ((1, 0.25), (2, 0.5))
    ]
    (logs / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = told(make_end_table(RunReader(tmp_path / "a"), "a"))
    assert "evaluation: accuracy" in shown
    assert "evaluation: loss" in shown
    assert "reward" not in shown


@pytest.mark.parametrize(
    ("scalars", "best"),
    [
        ({"train/loss": [3.0, 1.0, 2.0]}, "loss 1 at step 2"),
        ({"train/loss": [3.0, 1.0, 2.0], "train/accuracy": [0.1, 0.2, 0.9]}, "accuracy 0.9 at step 3"),
        ({"train/loss": [3.0, 1.0, 2.0], "eval/loss": [5.0, 6.0, 7.0]}, "evaluation: loss 5 at step 1"),
    ],
)
def test_the_list_has_dates_and_the_best_number_of_sft_and_dpo(tmp_path, scalars, best):
    logs = tmp_path / "a" / "logs"
    logs.mkdir(parents=True)
    began = time.mktime((2026, 3, 4, 5, 6, 0, 0, 0, -1))
    lines = [
        {"step": step, "time": began + step} | {name: values[step - 1] for name, values in scalars.items()}
        for step in (1, 2, 3)
    ]
    (logs / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    listed = told(runs_table(tmp_path))
    assert best in listed
    assert "2026-03-04 05:06" in listed


def test_runs_with_equal_settings_are_compared_by_their_versions(tmp_path):
    one, other = (make_run(tmp_path, name, 1, 2) for name in "ab")
    equal, results = map(told, compare_tables([one, other]))
    assert equal == "All settings are equal.\n"
    assert "0.2" in results
    (other / "versions.json").write_text('{"areno": "2"}')
    _, versions, _ = map(told, compare_tables([one, other]))
    assert [line.split() for line in versions.splitlines() if "areno" in line] == [
        ["│", "areno", "│", "1", "│", "2", "│"]
    ]
    (other / "config.yaml").unlink()
    unknown, _ = map(told, compare_tables([one, other]))
    assert unknown == "The settings of b are not known: there is no config.yaml.\n"


def test_the_algorithm_and_the_script_are_the_first_difference(tmp_path):
    runs = [make_run(tmp_path, name, 1, 2) for name in "abc"]
    for run, header in zip(runs, ("# Recipes: grpo\n", "# Recipes: gspo\n# Script: /a/own.py\n", ""), strict=True):
        (run / "config.yaml").write_text(header + (run / "config.yaml").read_text())
    settings, _ = map(told, compare_tables(runs))
    rows = [line.split() for line in settings.splitlines() if line.startswith("│")]
    assert rows[0] == ["│", "algorithm", "│", "grpo", "│", "gspo", "│", "│"]
    assert rows[1] == ["│", "script", "│", "│", "/a/own.py", "│", "│"]
    assert page_contents([RunReader(run) for run in runs])["differences"].keys() == {"algorithm", "script"}
    listed = told(runs_table(tmp_path))
    assert [name in listed for name in ("algorithm", "grpo", "gspo")] == [True] * 3
