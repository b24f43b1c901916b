"""`areno reproduce`: two runs from nothing, a curve and a verdict; mistakes are found before anything is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areno.api import Algorithm, algorithms
from areno.cli.__main__ import main
from areno.cli.reproduce import REPRODUCTIONS, ExpectedRanges
from areno.files.user_code import load_module
from areno.launch import yaml_files
from areno.launch.compose import load
from areno.recipes.grpo import GRPOConfig
from areno.tracking.reader import RunReader
from areno.trainers.rows import outcome_advantages
from areno.types import TrainSequence
from tests.helpers import warm_python

ROOT = Path(__file__).parents[2]
TINY = [
    "--base=total_train_steps=1",
    "--base=train_dataset.dataset_kwargs.count=64",
    "total_train_steps=2",
    "train_dataset.dataset_kwargs.count=64",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=2",
    "gconfig.max_new_tokens=8",
    "valid_dataset.dataset_kwargs.count=4",
    "reward.workers=1",
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cuntdown"], "NAME: there is no 'cuntdown'; did you mean countdown?"),
        (["go"], "NAME: there is no 'go'; there are countdown, arithmetic"),
        (["countdown", "--size=huge"], "--size: there is no 'huge'; there are auto, cpu, gpu"),
        (["countdown", "--algo=grop"], "--algo: there is no 'grop'; did you mean grpo?"),
        (["countdown", "--size=cpu", "-o", "there"], "--output: .*/there exists; name another folder, or continue"),
        (["countdown", "--size=cpu", "-o", "none", "--resume"], "--resume: there is no folder .*/none; start without"),
        (["countdown", "--size=cpu", "seed=2"], "seed: is set by areno reproduce; use --seed"),
        (["countdown", "--size=cpu", "--base=actor.path=x"], "actor.path: is set by areno reproduce"),
        (["countdown", "--size=cpu", "fast"], "'fast' is not a setting; expected key=value"),
    ],
)
def test_mistakes_are_found_at_the_door(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_all_mistakes_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "go", "--size=huge", "--algo=x", "seed=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 4 problems")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_size_gpu_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "countdown", "--size=gpu"]) == 2
    assert "--size: gpu needs a CUDA device, and there is none; use --size cpu" in capsys.readouterr().err


def test_each_reproduction_has_its_tasks() -> None:
    for name, sizes in REPRODUCTIONS.items():
        assert set(sizes) == {"cpu", "gpu"}
        for suffix in ("", "_cpu"):
            assert yaml_files.recipes_of(yaml_files.task_files()[f"{name}_base{suffix}"]) == ["sft"]
            assert {"grpo", "gspo"} <= set(yaml_files.recipes_of(yaml_files.task_files()[f"{name}{suffix}"]))


@pytest.mark.parametrize(
    ("base", "trained", "met"),
    [
        (0.10, 0.20, [True, True, True]),
        (0.10, 0.19, [True, True, False]),
        (0.04, 0.20, [False, True, True]),
        (0.10, 0.41, [True, False, True]),
        (0.0, 0.2, [False, True, True]),
        (0.0, 0.0, [False, False, False]),
    ],
)
def test_the_verdict(base: float, trained: float, met: list[bool]) -> None:
    bands = ExpectedRanges(base=(0.05, 0.15), trained=(0.15, 0.40), factor=2)
    assert [each for each, _ in bands.verdicts(base, trained)] == met


def test_the_page_has_the_bands() -> None:
    page = (ROOT / "docs/learning.md").read_text(encoding="utf-8")
    for name, sizes in REPRODUCTIONS.items():
        for size, bands in sizes.items():
            cells = [f"{band[0]:g} to {band[1]:g}" for band in (bands.base, bands.trained)]
            assert f"| `{name}` | {size} | {cells[0]} | {cells[1]} | {bands.factor:g} |" in page


@pytest.fixture
def warm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs have processes of their own that import nothing anew."""

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        done = warm_python.commands().run(command[1:], Path.cwd(), os.environ, timeout=900)
        os.write(1, done.stdout.encode())
        os.write(2, done.stderr.encode())
        return done

    monkeypatch.setattr("areno.cli.reproduce.subprocess", SimpleNamespace(run=run))


@pytest.mark.slow
def test_two_runs_and_their_verdict(
    warm_runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A base model of one step solves nothing: the verdict is no. A second start repeats no run."""
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "countdown", "--size=cpu", "--seed=3", *TINY]
    assert main(words) == 1
    output = tmp_path / "outputs/reproduce/countdown-cpu-s3"
    said = capfd.readouterr().out
    assert "NOT MET growth of the solve rate: 0.00 times" in said
    result = json.loads((output / "result.json").read_text())
    assert result["curve"]["steps"] == [1, 2]
    assert (result["size"], result["seed"], result["algo"]) == ("cpu", 3, "grpo")
    assert {"accuracy", "pass@4"} <= set(result["evaluations"])
    assert (output / "curve.svg").exists()
    for run in ("base", "grpo"):
        assert RunReader(output / run).config["seed"] == 3
    assert RunReader(output / "grpo").config["actor"]["path"] == str(output / "base/checkpoints/latest")
    before = (output / "grpo/logs/metrics.jsonl").read_bytes()
    assert main([*words, "--resume"]) == 1
    assert (output / "grpo/logs/metrics.jsonl").read_bytes() == before
    assert json.loads((output / "result.json").read_text())["evaluations"] == result["evaluations"]


@pytest.mark.slow
def test_a_failed_run_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "countdown", "--size=cpu", "--base=actor.optimzer.lr=1"]) == 1
    error = capfd.readouterr().err
    assert "actor.optimzer: unknown key" in error
    assert "the run of countdown_base_cpu failed with exit code 2" in error


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cpu_learns_countdown_from_nothing(warm_runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "countdown", "--size=cpu", "-o", "run"]) == 0


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_a_gpu_learns_from_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--size=gpu", "-o", "run"]) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert sum(result["seconds"].values()) < 600


SHUFFLED = ROOT / "examples/algorithms/shuffled_grpo.py"


def test_shuffled_advantages_are_those_of_grpo_in_another_order() -> None:
    actor = load(GRPOConfig, "quickstart").actor
    rows = [
        TrainSequence(prompt_mask=[True] + [False] * length, tokens=[3] * (length + 1), reward=float(length % 3 == 0))
        for length in range(1, 41)
    ]
    groups = [row // 8 for row in range(40)]
    [algorithm] = [each for each in vars(load_module(str(SHUFFLED), "test")).values() if isinstance(each, Algorithm)]
    algorithms.registered.pop(algorithm.name)  # other tests expect messages that list areno's own algorithms
    assert algorithm.advantage_fn is not None
    found, expected = algorithm.advantage_fn(rows, groups, actor), outcome_advantages(rows, groups, actor)
    assert [array.size for array in found] == list(range(1, 41))
    assert all(np.ptp(array) == 0 for array in found)
    first = np.array([array[0] for array in found]), np.array([array[0] for array in expected])
    assert not np.array_equal(*first)
    assert np.array_equal(np.sort(first[0]), np.sort(first[1]))
    again = algorithm.advantage_fn(rows, groups, actor)
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.slow
def test_a_control_has_fp8_in_the_rollout_alone(tmp_path: Path) -> None:
    fp8 = ["actor.fp8_config.mode=e4m3", "rollout.kv_cache_dtype=fp8"]
    differences = []
    for name, start in (("both", ["-m", "areno.recipes.grpo"]), ("rollout", ["examples/algorithms/fp8_rollout.py"])):
        place = [f"cluster.fileroot={tmp_path}", f"trial_name={name}", "experiment_name=x", "valid_dataset=null"]
        model = ["actor.path=examples/countdown/model_cpu", "actor.init_from_scratch=true"]
        tiny = [each for each in TINY if not each.startswith(("--base", "valid"))]
        words = [*start, "--config-name=countdown_cpu", *model, *fp8, *tiny, *place]
        done = warm_python.commands().run(words, ROOT, os.environ, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        steps = RunReader(tmp_path / "x" / name).steps()
        differences.append([steps[step]["train/logp_abs_diff_mean"] for step in (1, 2)])
    together, alone = differences
    assert max(together) < 1e-3 < min(alone)
