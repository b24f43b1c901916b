"""docs/plots.py, docs/learning_curves.py and docs/equal_tokens.py show what runs wrote."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areno.api import get_algorithm
from areno.api.metrics import MetricsRecorder
from areno.launch.compose import load
from tests.helpers import warm_python
from tests.helpers.pages import ROOT, blocks

DOCS = ROOT / "docs"
SCRIPT, LEARNING, TOKENS = (DOCS / name for name in ("plots.py", "learning_curves.py", "equal_tokens.py"))

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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (SCRIPT, ("{}/x.png", "None", "reward={}/nothing"), "there is no run"),
        (LEARNING, ("table", "{}"), "make them with: learning_curves.py run BASE"),
        (LEARNING, ("table", "{}", "GRPOO"), "there is no run 'GRPOO'"),
        (
            LEARNING,
            ("run", "base", "{}", "distillation, JSD"),
            "'distillation, JSD' needs --student, the checkpoint of a smaller base model",
        ),
    ],
)
def test_what_is_not_there_is_told(tmp_path, script, words, message):
    done = call(script, *(word.format(tmp_path) for word in words))
    assert done.returncode == 2
    assert message.format(tmp_path) in done.stderr


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


def learning_curves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("learning_curves")


@pytest.mark.slow
def test_commands_of_the_curves_of_countdown(monkeypatch, tmp_path):
    found = learning_curves(monkeypatch)
    for name in found.RUNS:
        for size in ("gpu", "cpu"):
            setup = found.Setup(Path("base"), Path("small"), tmp_path, size, True)
            _, *words = setup.command(name, 2)
            module, task, *settings = [word for word in words if word != "-m"]
            recipe = "grpo" if module.endswith(".py") else module.rpartition(".")[2]
            if (recipe, size) == ("ppo", "cpu"):
                continue  # PPO has no cut for CPUs
            config = load(get_algorithm(recipe).config, task.partition("=")[2], settings)
            is_student = name in found.GROUPS["distillation"] and name != found.TEACHER
            assert (config.seed, config.actor.path) == (2, "small" if is_student else "base")
            n_steps = 60 if size == "cpu" else 185 if recipe == "distill" else 100
            assert config.total_train_steps == (40 if name in found.GROUPS["fp8"] else n_steps)
            assert (DOCS.parent / module).is_file() or importlib.util.find_spec(module)
            if recipe == "distill":
                assert config.teacher.path == str(tmp_path / "learning/RL-s2/checkpoints/latest")


def test_students_wait_for_their_teachers(monkeypatch, tmp_path, capsys):
    found = learning_curves(monkeypatch)
    student = "distillation, JSD"
    jobs = found.with_teachers([(student, 1), ("GRPO", 1), (student, 2)], {}, tmp_path)
    assert jobs == [("RL", 1), ("RL", 2), (student, 1), ("GRPO", 1), (student, 2)]
    done = {"RL": [found.run_folder(tmp_path, "RL", 1)]}
    assert found.with_teachers([(student, 1), (student, 2)], done, tmp_path)[0] == ("RL", 2)

    events = tmp_path / "events"
    write = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + chr(10)); sys.exit(int(sys.argv[3]))"

    def command(self: Any, name: str, seed: int) -> list[str]:
        return [sys.executable, "-c", write, str(events), f"{name}-{seed}", str(int((name, seed) == ("RL", 2)))]

    monkeypatch.setattr(found.Setup, "command", command)
    assert not found.run(found.Setup(Path("base"), Path("small"), tmp_path), jobs, 4)
    order = events.read_text().splitlines()
    assert sorted(order) == ["GRPO-1", "RL-1", "RL-2", f"{student}-1"]
    assert order.index("RL-1") < order.index(f"{student}-1")
    assert f"{student}, seed 2: FAILED, because its teacher failed" in capsys.readouterr().out


def test_solve_rate_against_sampled_tokens(tmp_path):
    for name, factor, n_samples in (
        ("RL-s1", 1.0, 1000),
        ("distillation-JSD-s1", 1.2, 100),
        ("distillation-reverse-KL-s1", 0.9, 100),
    ):
        run_dir = tmp_path / "learning" / name
        with MetricsRecorder(None, run_dir / "logs/metrics.jsonl") as recorder:
            recorder.record(0, {"eval/accuracy": 0.1})
            for step in range(1, 9):
                recorder.record(step, {"rollout/response_len_mean": 100.0, "rollout/num_sequences": n_samples})
                if not step % 4:
                    recorder.record(step, {"eval/accuracy": factor * step * 0.1})
        (run_dir / "logs/run.log").write_text("12:00:00 done: 8 steps in 4 s\n")
    done = call(LEARNING, "tokens", tmp_path, tmp_path / "tokens.png", "distillation")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")
    # The goal is 0.95 * 0.8 = 0.76. RL is at 0.4 and 0.8 after 0.4 and 0.8 million tokens, and JSD is at 0.48 and 0.96
    # after 0.04 and 0.08 million.
    assert done.stdout.splitlines()[2:] == [
        "| RL | 0.100 | 0.800 | 0.80 | 0.76 | 1.00 |",
        "| distillation, reverse KL | 0.100 | 0.720 | 0.08 | never | - |",
        "| distillation, JSD | 0.100 | 0.960 | 0.08 | 0.06 | 0.08 |",
    ]
    (tmp_path / "learning/RL-s1/logs/run.log").unlink()
    assert "there is no run 'RL'" in call(LEARNING, "tokens", tmp_path, tmp_path / "x.png").stderr


# Settings of a sweep at equal tokens ---------------------------------------------------------------------------------


def made_sweep(folder: Path, seeds: dict[str, list[int]]) -> None:
    """Fixed weights sample 400 tokens a step and solve 0.1 more each. The bandit samples 200 and gains 0.1 * seed."""
    settings = [(name, seed) for name, of in seeds.items() for seed in of]
    for number, (name, seed) in enumerate(settings):
        run_dir, n_samples = folder / str(number), 40 if name == "fixed" else 20
        with MetricsRecorder(None, run_dir / "logs/metrics.jsonl") as recorder:
            for step in range(5):
                if step:
                    recorder.record(step, {"rollout/response_len_mean": 10.0, "rollout/num_sequences": n_samples})
                if not step % 2:
                    gain = 0.0 if name == "fixed" else seed * step / 40
                    rate = 0.1 * (step if name == "fixed" else step / 2)
                    recorder.record(step, {"eval/accuracy": 0.5, "eval/hard/accuracy": rate + gain})
        (run_dir / "logs/run.log").write_text("12:00:00 done: 4 steps in 4 s\n")
        (run_dir / "config.yaml").write_text(f"seed: {seed}\n")
        overrides = ["lr=1", f"seed={seed}", f"curriculum.type={name}"]
        (run_dir / "overrides.yaml").write_text("".join(f"- {each}\n" for each in overrides))


def test_settings_are_compared_at_equal_tokens(tmp_path):
    made_sweep(tmp_path, {"fixed": [1, 2, 3], "bandit": [1, 2, 3, 4]})
    # The bandit ends after 800 tokens, with 0.2 + 0.1 * seed. At 800 tokens the baseline has 0.2. The differences are
    # 0.1, 0.2 and 0.3: 4.303 * 0.1 / sqrt(3) = 0.248.
    assert call(TOKENS, tmp_path).stdout.splitlines() == [
        "| seeds: 3, 0.8 thousand tokens | mean | hard |",
        "|---|---|---|",
        "| curriculum.type=fixed | 0.500 | 0.200 |",
        "| curriculum.type=bandit | +0.000 ± 0.000 | +0.200 ± 0.248 |",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_curriculum_run(tmp_path):
    [lines] = [text.splitlines() for info, text in blocks(DOCS / "learning.md") if info == "bash mixture"]
    shorter = {
        "--config-name=mixture_base": ["train_dataset.dataset_kwargs.count=320"],
        "--config-name=mixture": ["total_train_steps=1", "evaluator.freq_steps=1", "valid_dataset.max_rows=2"],
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment[warm_python.WARM_WORKERS] = "1"
    for line in lines:
        line = re.sub("(?<= )(?=(docs|examples)/)", f"{ROOT}/", line.replace("seed=1,2,3,4,5", "seed=1"))
        words = shlex.split(line)[1:]
        more = [setting for word in words for setting in shorter.get(word, [])]
        done = warm_python.commands().run([*words, *more], tmp_path, environment, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    first, _, *rest = (line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    assert (first[0][:8], first[1:]) == ("seeds: 1", ["mean", "countdown", "arithmetic", "tools"])
    settings = ["{}", "{type:bandit}", "{type:bandit,temperature:0.3}", "{rest_epochs:1}"]
    assert [setting.partition("=")[2] for setting, *_ in rest] == settings


@pytest.mark.parametrize(
    ("seeds", "message"),
    [({}, "there are no completed runs in"), ({"fixed": [1], "bandit": [2]}, "the settings have no seed in common")],
)
def test_a_sweep_without_a_comparison(tmp_path, seeds, message):
    made_sweep(tmp_path, seeds)
    done = call(TOKENS, tmp_path)
    assert (done.returncode, message in done.stderr) == (2, True)
