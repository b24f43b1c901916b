"""What a sweep comes to: its table, its files, its names in TensorBoard and reports."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from areno.api import get_algorithm
from areno.launch.compose import load
from areno.launch.sweep_results import Sweep
from areno.report.verdict import run_names
from areno.tracking.reader import RunReader
from tests.helpers.made_up_runs import make_run

RUNS = [("1e-4", 1, 0.5), ("1e-4", 2, 0.7), ("2e-4", 1, 0.9), ("2e-4", 2, None), ("3e-4", 1, 0.65)]


def swept(folder: Path, mode: str = "max", order: Sequence[int] = range(len(RUNS))) -> Sweep:
    """order: in which the runs end."""
    sweep = Sweep(folder, "eval/accuracy", mode)  # type: ignore[arg-type]
    for number in order:
        lr, seed, objective = RUNS[number]
        (folder / str(number) / "tensorboard").mkdir(parents=True)
        overrides = [f"actor.optimizer.lr={lr}", f"seed={seed}", "gconfig.n_samples=4"]
        sweep.add(number, overrides, objective, folder / str(number))
    return sweep


def test_the_table_is_sorted_and_marks_the_best(tmp_path: Path) -> None:
    assert (
        swept(tmp_path).text()
        == f"""\
5 runs in {tmp_path}, by eval/accuracy (more is better)

    run  actor.optimizer.lr  seed  objective
    2    2e-4                1     0.9
    1    1e-4                2     0.7
    4    3e-4                1     0.65
    0    1e-4                1     0.5
    3    2e-4                2     failed

over seeds
     actor.optimizer.lr  mean  std   runs
  *  2e-4                0.9         2
     3e-4                0.65        4
     1e-4                0.6   0.14  0, 1

actor.optimizer.lr=2e-4: better than actor.optimizer.lr=3e-4 by 0.25. Without several seeds, the spread of a result is not known.

best single run: run 2, in {tmp_path / "2"}"""  # noqa: E501
    )


def test_a_lead_inside_the_spread_of_seeds_has_no_star_and_says_so_as_the_report(tmp_path: Path) -> None:
    for results, star in {(0.5, 0.9, 0.75, 0.85): False, (0.1, 0.2, 0.8, 0.9): True}.items():
        sweep = Sweep(tmp_path, "eval/accuracy", "max")
        for number, objective in enumerate(results):
            sweep.add(number, [f"lr={1 + number // 2}", f"seed={number % 2}"], objective, tmp_path / str(number))
        text = sweep.text()
        assert ("*" in text) == star
        (first, second), spread = sweep.averages(), max(one.std or 0.0 for one in sweep.averages())
        more = "more" if star else "not more"
        told = f"better than lr=1 by {first.mean - second.mean:.4g}, {more} than the standard deviation over seeds"
        assert f"lr=2: {told} ({spread:.2g})." in text


def test_runs_may_end_in_any_order(tmp_path: Path) -> None:
    """Runs side by side do, and what is said of them is the same."""
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 1, 0, 3]):
        folder = tmp_path / str(order[0])
        sweep = swept(folder, order=order)
        files = [(folder / name).read_text() for name in ("sweep.json", "sweep.csv")]
        found.append([sweep.text().replace(str(folder), ""), *files])
    assert found[0] == found[1]


def test_less_of_a_loss_is_better_and_what_is_no_number_is_last(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "min")
    sweep.add(5, ["seed=3"], float("nan"), tmp_path / "5")
    assert [one.number for one in sweep.ranked] == [0, 4, 1, 2, 3, 5]
    assert "(less is better)" in sweep.text()
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["runs"][-1] == {"run": 5, "objective": None, "status": "completed", "overrides": {"seed": "3"}}


def test_files_hold_the_same(tmp_path: Path) -> None:
    swept(tmp_path)
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert (found["objective"], found["mode"], found["best"]) == ("eval/accuracy", "max", 2)
    assert [run["run"] for run in found["runs"]] == [2, 1, 4, 0, 3]
    assert found["averages"][2] == {
        "overrides": {"actor.optimizer.lr": "1e-4"},
        "mean": pytest.approx(0.6),
        "std": pytest.approx(0.02**0.5),
        "runs": [0, 1],
    }
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "run": "2",
        "objective": "0.9",
        "actor.optimizer.lr": "2e-4",
        "seed": "1",
        "gconfig.n_samples": "4",
    }
    assert rows[-1]["objective"] == ""


def test_a_seed_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "reward", "max")
    for number, (seed, objective) in enumerate([(1, None), (1, 0.5), (1, 0.5), (2, 0.7)]):
        if number == 3:
            assert sweep.averages() == [], "one seed is no sample of seeds"
            assert "over seeds" not in sweep.text()
        sweep.add(number, [f"seed={seed}"], objective, tmp_path / str(number))
    [average] = sweep.averages()
    assert average.mean == pytest.approx(0.6)
    assert average.runs == [1, 3]
    assert "\nrun 2 has the settings of run 1, so an average counts the two as one\n" in sweep.text()


def test_a_sweep_without_seeds_or_results_has_no_averages_or_best(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "train/loss", "min")
    sweep.add(0, ["variant=dapo"], None, tmp_path / "0")
    assert "over seeds" not in sweep.text()
    assert "best" not in sweep.text()
    assert json.loads((tmp_path / "sweep.json").read_text())["best"] is None


def test_tensorboard_calls_runs_by_what_differs(tmp_path: Path) -> None:
    swept(tmp_path)
    links = {link.name: os.readlink(link) for link in (tmp_path / "tensorboard").iterdir()}
    assert links == {
        f"{number} lr={lr} seed={seed}": f"../{number}/tensorboard" for number, (lr, seed, _) in enumerate(RUNS)
    }


def test_reports_call_runs_by_what_differs(tmp_path: Path) -> None:
    for number in range(2):
        run = make_run(tmp_path / "sweep", str(number), 1, 1)
        (run / "overrides.yaml").write_text(f"- actor.optimizer.lr={number}\n- seed=1\n")
    (tmp_path / "sweep/multirun.yaml").write_text("{}")
    alone = make_run(tmp_path, "alone", 1, 1)
    (alone / "overrides.yaml").write_text("- seed=7\n")
    runs = [RunReader(path) for path in (tmp_path / "sweep/0", tmp_path / "sweep/1", alone)]
    assert run_names(runs) == ["0 lr=0", "1 lr=1", "alone"]
    for number in range(2):
        long = f"- train_dataset.path=/data/of/{number}.jsonl\n- reward.fn=[{'a.py,' * 20}]\n- seed={number}\n"
        (tmp_path / f"sweep/{number}/overrides.yaml").write_text(long)
    names = run_names([RunReader(run.path) for run in runs])
    assert names == ["0 path=0.jsonl seed=0", "1 path=1.jsonl seed=1", "alone"]
    (tmp_path / "sweep/0/overrides.yaml").write_text(f"- reward.fn=[{'b.py,' * 20}]\n")
    [name, _, _] = run_names([RunReader(run.path) for run in runs])
    assert name.startswith("0 fn=[b.py,b.py")
    assert (len(name), name[-3:]) == (50, "...")


@pytest.mark.parametrize(
    ("recipe", "task", "evaluated", "trained"),
    [
        ("gspo", "quickstart", "eval/accuracy", "rollout/rewards_mean"),
        pytest.param("ppo", "quickstart_ppo", "eval/accuracy", "rollout/rewards_mean", marks=pytest.mark.slow),
        pytest.param("dpo", "quickstart_dpo", "eval/accuracy", "train/accuracy", marks=pytest.mark.slow),
        ("sft", "quickstart_base", "eval/loss", "train/loss"),
    ],
)
def test_the_objective_is_the_result_of_the_run(
    recipe: str, task: str, evaluated: str, trained: str, tmp_path: Path
) -> None:
    """With and without evaluation, the result of a short run is the scalar that the objective names."""
    algorithm = get_algorithm(recipe)
    rows = [
        {"prompt": f"{a}+9=", "solutions": str(a + 9), "chosen": str(a + 9), "rejected": str(a), "response": str(a + 9)}
        for a in range(11, 19)
    ]
    for name in (evaluated, trained):
        settings = ["total_train_steps=2", "train_dataset.batch_size=8", "engine.device=cpu"]
        settings += ["actor.path=examples/quickstart/model", "actor.init_from_scratch=false"]
        settings += ["gconfig.n_samples=2"] if recipe in ("gspo", "ppo") else []
        given = {"train_dataset": rows, "valid_dataset": rows[:4]}
        if name == trained:
            settings.append("valid_dataset=null")
            given.pop("valid_dataset")
        elif recipe == "sft":  # its task evaluates nothing
            settings += ["valid_dataset=default", "valid_dataset.path=rows.jsonl"]
        config = load(algorithm.config, task, settings)
        with algorithm.trainer(config, tmp_path / name.replace("/", "_"), **given) as trainer:
            result = trainer.fit()
        values = RunReader(tmp_path / name.replace("/", "_")).series(name).values
        told, mode = config.objective()
        assert told.startswith(name)
        assert mode == ("min" if recipe == "sft" else "max")
        expected = sum(values) / 2 if "mean of the last 5" in told else values[-1]
        assert result == pytest.approx(expected)
