"""The verdict of a report: the winner, by which number, and how far the seeds lie apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import pytest

from areno.launch.sweep_results import Sweep
from areno.report.verdict import verdict
from areno.tracking.reader import RunReader


def make_run(folder: Path, *accuracies: float, header: str = "", **settings: object) -> RunReader:
    """A run that was evaluated with these results."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(header + json.dumps(settings))
    (folder / "versions.json").write_text("{}")
    lines = [{"step": step, "time": 100.0 + step, "eval/accuracy": one} for step, one in enumerate(accuracies)]
    (folder / "logs/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunReader(folder)


def make_sweep(
    folder: Path, results: dict[str, list[float | None]], mode: Literal["max", "min"] = "max"
) -> list[RunReader]:
    """A sweep over learning rates with one run for each seed. None: the run failed."""
    sweep = Sweep(folder, "eval/accuracy of the last evaluation", mode)
    runs = []
    for lr, objectives in results.items():
        for seed, objective in enumerate(objectives):
            runs.append(make_run(folder / str(len(runs)), 0.0, objective or 0.0))
            sweep.add(len(runs) - 1, [f"lr={lr}", f"seed={seed}"], objective, runs[-1].path)
    (folder / "multirun.yaml").touch()
    return runs


def verdict_of(runs: list[RunReader]):
    return verdict(runs, [f"run {run.path.name}" for run in runs], [run.metrics() for run in runs])


def test_a_sweep_is_won_by_settings_not_by_a_lucky_seed(tmp_path):
    runs = make_sweep(tmp_path, {"0.1": [0.5, 0.9], "0.2": [0.75, 0.85]})
    found = verdict_of(runs)
    assert found["about"] == "a sweep of 4 runs, by eval/accuracy of the last evaluation (more is better)"
    assert (found["title"], found["spread"]) == ("lr=0.2", "mean ± standard deviation over 2 seeds")
    assert found["value"] == pytest.approx(0.8)
    assert found["std"] == pytest.approx(math.sqrt(0.005))
    assert found["notes"] == [
        "Better than lr=0.1 by 0.1, not more than the standard deviation over seeds (0.28).",
        "The best single run is run 1, with 0.9.",
    ]
    assert [(place["title"], place["runs"], place["values"]) for place in found["places"]] == [
        ("lr=0.2", [2, 3], [0.75, 0.85]),
        ("lr=0.1", [0, 1], [0.5, 0.9]),
    ]
    assert found["best"] == 1
    written = json.loads((tmp_path / "sweep.json").read_text())["averages"]
    assert [(one["mean"], one["std"]) for one in written] == [(one["value"], one["std"]) for one in found["places"]]


def test_less_can_be_better_and_the_lead_more_than_the_spread(tmp_path):
    found = verdict_of(make_sweep(tmp_path, {"0.1": [0.5, 0.6], "0.2": [0.1, 0.2]}, "min"))
    assert (found["title"], found["best"]) == ("lr=0.2", 2)
    assert found["notes"][0] == "Better than lr=0.1 by 0.4, more than the standard deviation over seeds (0.071)."


def test_a_sweep_without_seeds_says_so(tmp_path):
    found = verdict_of(make_sweep(tmp_path, {"0.1": [0.5], "0.2": [0.7]}))
    assert (found["title"], found["value"], found["std"], found["spread"]) == ("run 1", 0.7, None, "one run")
    assert found["notes"] == ["Better than run 0 by 0.2. Without several seeds, the spread of a result is not known."]


def test_a_sweep_over_seeds_alone_has_a_mean(tmp_path):
    found = verdict_of(make_sweep(tmp_path, {"0.1": [0.5, 0.7]}))
    assert (found["title"], found["value"]) == ("2 runs of the same settings", pytest.approx(0.6))
    assert found["notes"] == ["The best single run is run 1, with 0.7."]


def test_runs_without_a_result_are_named(tmp_path):
    runs = make_sweep(tmp_path, {"0.1": [0.5, 0.7], "0.2": [None, math.nan]})
    runs.append(make_run(tmp_path / "9", 0.0))
    found = verdict_of(runs)
    assert found["notes"][1:] == ["Without a result: run 2, 3.", "Not ended: run 9."]
    assert found["best"] == 1
    none = verdict_of(make_sweep(tmp_path / "none", {"0.1": [None, None]}))
    assert (none["title"], none["value"], none["best"], none["places"]) == ("no run has a result", None, None, [])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "null",
        "{}",
        "[" * 100_000,
        '{"objective": "x", "mode": "max", "runs": [{"run": 0}]}',
        '{"objective": "x", "mode": "max", "runs": [{"run": 0, "objective": [], "overrides": {}}]}',
        '{"objective": "x", "mode": "max", "runs": [{"run": 0, "objective": 1, "overrides": 7}]}',
        "\xff",
    ],
)
def test_a_damaged_sweep_file_does_not_refuse_the_report(content, tmp_path):
    runs = make_sweep(tmp_path, {"0.1": [0.5], "0.2": [0.7]})
    (tmp_path / "sweep.json").write_bytes(content.encode("latin-1"))
    found = verdict_of(runs)
    assert (found["best"], found["value"]) == (1, 0.7)
    assert found["notes"][-1] == f"{tmp_path / 'sweep.json'} is damaged, so the last values are compared."


def test_runs_of_any_folders_are_compared_by_their_last_values(tmp_path):
    one, other = make_run(tmp_path / "one", 0.9, 0.5, lr=1, seed=1), make_run(tmp_path / "other", 0.6, lr=2, seed=1)
    found = verdict_of([one, other])
    assert found["about"] == "comparison of 2 runs, by eval/accuracy of the last evaluation (more is better)"
    assert (found["title"], found["value"]) == ("run other", 0.6)
    third = make_run(tmp_path / "third", 0.9, lr=1, seed=2)
    found = verdict_of([one, other, third])
    assert (found["title"], found["value"], found["places"][0]["runs"]) == ("lr=1", pytest.approx(0.7), [0, 2])


def test_algorithms_are_compared_and_no_run_is_left_out(tmp_path):
    headers = ["# Recipes: grpo\n", "# Recipes: gspo\n", "# Settings: PPOConfig\n# Script: /a/train.py\n"]
    runs = [make_run(tmp_path / f"{at}", at / 10, header=header, seed=1) for at, header in enumerate(headers)]
    found = verdict_of(runs)
    assert [(place["title"], place["value"]) for place in found["places"]] == [
        ("run 2", 0.2),
        ("run 1", 0.1),
        ("run 0", 0.0),
    ]
    again = make_run(tmp_path / "again", 0.7, header=headers[0], seed=1)
    other = make_run(tmp_path / "other", header=headers[0], seed=2)
    found = verdict_of([runs[0], again, other])
    assert "run again has the settings of run 0, so a mean counts the two as one." in found["notes"]
    assert "Without eval/accuracy: run other." in found["notes"]


def test_training_counts_where_nothing_is_evaluated(tmp_path):
    runs = []
    for name, losses in {"a": [9.0, 1.0, 2.0], "b": [1.0, 1.5]}.items():
        runs.append(make_run(tmp_path / name))
        lines = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]
        (tmp_path / name / "logs/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = verdict_of(runs)
    assert found["about"] == "comparison of 2 runs, by train/loss, mean of the last 5 steps (less is better)"
    assert (found["title"], found["value"]) == ("run b", 1.25)
    alone = verdict_of(runs[:1])
    assert (alone["title"], alone["value"], alone["notes"]) == ("loss", 2.0, ["9 at the start."])


def test_the_verdict_of_one_run(tmp_path):
    run = make_run(tmp_path / "one", 0.25, 0.75, 0.5)
    found = verdict_of([run])
    assert (found["about"], found["title"], found["value"]) == ("2 steps in 0:02", "evaluation: accuracy", 0.5)
    assert (found["spread"], found["scalar"]) == ("eval/accuracy, last value", "eval/accuracy")
    assert found["notes"] == ["0.25 at the start.", "Best: 0.75 at step 1."]
    assert verdict_of([make_run(tmp_path / "new")])["notes"] == ["It has recorded no result yet."]


def test_the_warnings_of_a_run_are_in_its_report(tmp_path):
    run = make_run(tmp_path / "run", 0.5, 0.7)
    lines = ["12:00:00 step=3 seconds=1", "12:00:01 warning: step 3: it diverges", "12:00:02 warning: a disk is full"]
    (run.path / "logs/run.log").write_text("\n".join([*lines, *lines]) + "\n")
    assert run.warnings() == ["step 3: it diverges"]
    assert verdict_of([run])["notes"][-1] == "Warning: step 3: it diverges"
