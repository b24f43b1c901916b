"""docs/plots.py, docs/algorithm_curves.py and docs/learning_curves.py draw what runs wrote."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from areno.api import get_algorithm
from areno.api.metrics import MetricsRecorder
from areno.launch.compose import load

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT, CURVES, LEARNING = (DOCS / name for name in ("plots.py", "algorithm_curves.py", "learning_curves.py"))

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def call(script: Path, *arguments: object) -> Done:
    """`python SCRIPT ARGUMENTS` in this process, which imports matplotlib once."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.syspath_prepend(str(script.parent))
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def draw(*arguments: object) -> Done:
    return call(SCRIPT, *arguments)


def test_image_of_two_seeds(tmp_path):
    for seed in (1, 2):
        with MetricsRecorder(None, tmp_path / f"s{seed}/logs/metrics.jsonl") as recorder:
            for step in range(1, 6):
                recorder.record(step, {"rollout/rewards_mean": step * seed / 10})
                recorder.record(step, {"train/loss": -1.0})
    image = tmp_path / "images/reward.png"
    done = draw(image, "Two seeds", f"reward={tmp_path}/s*", f"loss={tmp_path}/s1@train/loss")
    assert done.returncode == 0, done.stderr
    assert image.read_bytes().startswith(b"\x89PNG")
    assert 2_000 < image.stat().st_size < 60_000


def test_scalar_that_is_not_there(tmp_path):
    with MetricsRecorder(None, tmp_path / "run/logs/metrics.jsonl") as recorder:
        recorder.record(1, {"train/loss": -1.0})
    done = draw(tmp_path / "x.png", "None", f"reward={tmp_path}/run@train/los")
    assert done.returncode == 2
    assert "has no scalar train/los; it has train/loss" in done.stderr


def test_run_that_is_not_there(tmp_path):
    done = draw(tmp_path / "x.png", "None", f"reward={tmp_path}/nothing")
    assert done.returncode == 2
    assert "there is no run" in done.stderr


# Curves of the algorithms --------------------------------------------------------------------------------------------


def curves(*arguments: object) -> Done:
    return call(CURVES, *arguments)


def algorithm_runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, list[str]]]:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("algorithm_curves").RUNS


def test_curves_of_two_algorithms(tmp_path):
    for name, factor in (("GRPO", 1.0), ("Truncated-IS", 0.5)):
        run_dir = tmp_path / "algorithms" / name
        with MetricsRecorder(None, run_dir / "logs/metrics.jsonl") as recorder:
            for step in range(1, 9):
                recorder.record(step, {"rollout/rewards_mean": factor * step / 8, "time/step": 0.5})
            recorder.record(8, {"eval/accuracy": 0.75})
        (run_dir / "logs/run.log").write_text("12:00:00 done: 8 steps in 4 s\n")
    (tmp_path / "algorithms/PPO").mkdir()  # still on its way
    image = tmp_path / "images/algorithms.png"
    done = curves("draw", tmp_path, image)
    assert done.returncode == 0, done.stderr
    assert image.read_bytes().startswith(b"\x89PNG")
    assert 2_000 < image.stat().st_size < 60_000
    assert done.stdout.splitlines()[2:] == [
        "| GRPO | 0.12 -> 0.75 | 0.750 | 4 |",
        "| Truncated IS | 0.06 -> 0.38 | 0.750 | 4 |",
    ]


def test_no_curves(tmp_path):
    done = curves("draw", tmp_path, tmp_path / "x.png")
    assert done.returncode == 2
    assert f"there are no runs in {tmp_path}; make them with: algorithm_curves.py run" in done.stderr


def test_settings_of_the_curves_compose(monkeypatch):
    for recipe, settings in algorithm_runs(monkeypatch).values():
        algorithm = get_algorithm(recipe)
        assert load(algorithm.config, algorithm.default, settings).total_train_steps == 60


def test_the_page_has_a_row_for_every_curve(monkeypatch):
    section = (DOCS / "algorithms.md").read_text(encoding="utf-8").split("\n## On the quickstart\n")[1]
    assert re.findall(r"^\| ([^|]+?) \| 0\.\d+ -> ", section, re.M) == list(algorithm_runs(monkeypatch))


# Curves of countdown -------------------------------------------------------------------------------------------------


def test_curves_of_countdown(tmp_path):
    for name, factor in (("GRPO-s1", 1.0), ("GRPO-s2", 0.8), ("lr-1e-4-s1", 0.5)):
        run_dir = tmp_path / "learning" / name
        with MetricsRecorder(None, run_dir / "logs/metrics.jsonl") as recorder:
            for step in range(1, 9):
                values = {"rollout/rewards_mean": factor * step / 8, "rollout/response_len_mean": 10.0 * step}
                recorder.record(step, {**values, "train/entropy": 0.25, "time/step": 0.5})
            recorder.record(8, {"eval/accuracy": factor / 2, "eval/pass@16": 0.75})
        (run_dir / "logs/run.log").write_text("12:00:00 done: 8 steps in 4 s\n")
    done = call(LEARNING, "draw", tmp_path, tmp_path / "curves.png", "algorithms", "rates")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert call(LEARNING, "table", tmp_path).stdout.splitlines()[2:] == [
        "| GRPO | 0.562, 0.450 | 0.500, 0.400 | 0.750, 0.750 | 45, 45 | 0.250, 0.250 | 0.50, 0.50 |",
        "| lr 1e-4 | 0.281 | 0.250 | 0.750 | 45 | 0.250 | 0.50 |",
    ]


def test_no_curves_of_countdown(tmp_path):
    done = call(LEARNING, "table", tmp_path)
    assert done.returncode == 2
    assert "make them with: learning_curves.py run BASE" in done.stderr
    assert "there is no run 'GRPOO'" in call(LEARNING, "table", tmp_path, "GRPOO").stderr


def test_commands_of_the_curves_of_countdown(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(DOCS))
    found = importlib.import_module("learning_curves")
    for name in found.RUNS:
        _, *words = found.command(Path("base"), tmp_path, name, 2, True)
        module, task, *settings = [word for word in words if word != "-m"]
        recipe = "grpo" if module.endswith(".py") else module.rpartition(".")[2]
        config = load(get_algorithm(recipe).config, task.partition("=")[2], settings)
        assert (config.seed, config.total_train_steps, config.actor.path) == (2, 100, "base")
        assert (DOCS.parent / module).is_file() or importlib.util.find_spec(module)
