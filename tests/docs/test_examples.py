"""What users start from: the GSM8K loader and reward on the real rows, and an algorithm of one's own."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from areno.api import algorithms, get_algorithm
from areno.config.datasets import DatasetConfig
from areno.config.reward import RewardConfig
from areno.data.sources import load_rows
from areno.files.user_code import load_function
from areno.launch.compose import load
from areno.reward_fns import math_reward
from areno.scoring.pool import RewardPool
from areno.tracking.reader import RunReader
from areno.types import RewardRecord, TrainSequence
from tests.helpers import warm_python
from tests.helpers.loss_rows import PRECISIONS, check, random_rows, trained

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared/data/gsm8k/test.jsonl"
LOADER = "examples/math/dataset_loader.py"
REWARD = "examples/math/math_verify_reward.py"

needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not there")


def gsm8k_rows():
    return load_rows(DatasetConfig(path=str(GSM8K), loader=LOADER), "prompt")


@needs_gsm8k
def test_loader_on_gsm8k():
    rows = gsm8k_rows()
    assert len(rows) == 1319
    assert rows[0]["prompt"].startswith("Janet")
    assert rows[0]["prompt"].endswith("\\boxed{}.")
    assert rows[0]["solutions"] == "18"
    assert all(set(row["solutions"]) <= set("-0123456789,.") for row in rows)


def test_the_loader_of_alpaca_makes_what_its_rows_are_read_as(tmp_path):
    rows = [
        {"instruction": "Add the numbers.", "input": "2, 3", "output": "5"},
        {"instruction": "Say hello.", "input": "", "output": "Hello."},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = DatasetConfig(path=str(tmp_path / "rows.json"), loader="examples/sft/alpaca/dataset_loader.py")
    made = list(load_rows(config, "sft"))
    assert made == [
        {"prompt": "Add the numbers.\n2, 3", "response": "5"},
        {"prompt": "Say hello.", "response": "Hello."},
    ]
    read = load_rows(DatasetConfig(path=config.path), "sft")
    assert [{name: row[name] for name in ("prompt", "response")} for row in read] == made


@needs_gsm8k
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reward", ["examples", "built-in"])
def test_reward_agrees_with_the_labels(reward, every):
    if reward == "examples":
        reward_fn = load_function(str(ROOT / REWARD), "reward_fn", "reward.fn")
    else:
        reward_fn = math_reward.reward_fn
    answers = [json.loads(line)["answer"] for line in GSM8K.open(encoding="utf-8")]
    wrong = []
    for row, answer in list(zip(gsm8k_rows(), answers, strict=True))[::every]:
        gold = row["solutions"]
        other = str(int(gold.replace(",", "")) + 1)
        given = {answer: 1.0, f"so \\boxed{{{gold}}}.": 1.0, f"\\boxed{{{other}}}": 0.0, f"{gold}\n#### {other}": 0.0}
        got = {text: reward_fn(RewardRecord(completion=text, solutions=gold)) for text in given}
        if got != given:
            wrong.append((gold, got))
    assert wrong == []


@pytest.mark.parametrize("fn", [REWARD, "math"])
def test_reward_runs_in_its_process(fn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the examples are found from any folder
    texts = [
        r"\boxed{\frac{1}{2}}",
        r"\boxed{3}, no: \boxed{0.5}",
        "",
        "no number",
        r"\boxed{",
        "#### 1/2",
        r"\boxed{2}",
    ]
    with RewardPool(RewardConfig(fn=fn, workers=1)) as pool:
        outcomes = pool.score([RewardRecord(completion=text, solutions="1/2") for text in texts])
    assert [outcome.value for outcome in outcomes] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_stories():
    rows = load_rows(DatasetConfig(loader="examples/stories/dataset_loader.py"), "prompt")
    assert len({row["prompt"] for row in rows}) == 64
    assert rows[0]["prompt"] == "<s>Once upon a time, there was a little girl named Lily."
    reward_fn = load_function(str(ROOT / "examples/stories/reward.py"), "reward_fn", "reward.fn")
    given = {"A Dog!": 1.0, "two puppies ran": 1.0, "the dogs.": 1.0, "a doge": 0.0, "hotdog": 0.0, "": 0.0}
    assert {text: reward_fn(RewardRecord(completion=text)) for text in given} == given


def test_preferences_of_the_quickstart():
    """One digit of the sum tells the answers apart, and no numbers are in both splits."""
    numbers = {}
    for split in ("train", "test"):
        config = DatasetConfig(split=split, loader="examples/quickstart/dataset_loader.py:preferences")
        rows = load_rows(config, "dpo")
        numbers[split] = {tuple(map(int, row["prompt"][:-1].split("+"))) for row in rows}
        assert len(numbers[split]) == len(rows)
        for row in rows:
            assert int(row["chosen"]) == eval(row["prompt"][:-1])
            assert int(row["rejected"]) == int(row["chosen"]) - 10
    assert len(numbers["train"]) > 9 * len(numbers["test"]) > 3000
    assert not numbers["train"] & numbers["test"]


# An algorithm of one's own -------------------------------------------------------------------------------------------

DRO = ROOT / "examples/algorithms/dro.py"


@pytest.fixture(scope="module")
def dro():
    spec = importlib.util.spec_from_file_location("dro", DRO)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dro"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["dro"]
    algorithms.registered.pop("dro", None)  # other tests expect messages that list areno's own algorithms


def run_dro(folder, *arguments, script=DRO):
    """`python dro.py` from another folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    return warm_python.commands().run([str(script), *arguments], folder, environment, timeout=200)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
def test_dro_loss(dro, dtype, tol):
    tau, rows = 0.3, random_rows(constant_advantage=True)
    n_rows = sum(any(row["mask"]) for row in rows)
    loss, gradient, kl = 0.0, [], 0.0
    for row in rows:
        h = sum(row["outputs"][t] - row["ref_logprobs"][t] for t in trained(row))
        residual = row["advantages"][0] - tau * h if trained(row) else 0.0
        loss += residual**2 / 2 / n_rows
        kl += h / n_rows
        gradient += [-tau * residual / n_rows if t in trained(row) else 0.0 for t in range(len(row["mask"]))]
    stats = check(partial(dro.dro_loss_fn, tau=tau), rows, (loss, gradient), dtype, tol)
    assert stats["ref_kl"].item() == pytest.approx(kl, rel=tol)


def test_dro_advantages(dro):
    """R less what the samples of its prompt are worth; every second group has one sample, masks have holes."""
    tau, groups, rows = 0.25, [7, 8, 7, 9, 7], random_rows(seed=3)
    sequences = [
        TrainSequence(
            tokens=[0] * len(row["mask"]),
            prompt_mask=[not kept for kept in row["mask"]],
            logprobs=row["old_logprobs"],
            ref_logprobs=row["ref_logprobs"],
            reward=float(number),
        )
        for number, row in enumerate(rows)
    ]
    found = dro.advantages(sequences, groups, dro.DROActorConfig(path="m", tau=tau))
    soft = [
        number - tau * math.fsum(row["old_logprobs"][t] - row["ref_logprobs"][t] for t in trained(row))
        for number, row in enumerate(rows)
    ]
    assert [len(array) for array in found] == [len(trained(row)) for row in rows]
    for number, array in enumerate(found):
        same = [soft[other] for other in range(5) if groups[other] == groups[number]]
        np.testing.assert_allclose(array, number - math.fsum(same) / len(same), rtol=1e-12)


def test_dro_is_an_algorithm_like_others(dro):
    algorithm = get_algorithm("dro")
    config = load(algorithm.config, "quickstart", ["actor.tau=0.5"])
    assert algorithm.make_loss(config).keywords == {"tau": 0.5}
    assert config.ref is not None


@pytest.mark.slow
def test_dro_on_the_command_line(tmp_path):
    shown = run_dro(tmp_path, "--help")
    assert "actor.tau" in shown.stdout
    assert shown.stdout.startswith(f"usage: python {DRO}")
    assert "  tau: 0.2\n" in run_dro(tmp_path, "--cfg", "job").stdout
    wrong = run_dro(tmp_path, "actor.tao=1", "actor.tau=-1", "actor.eps_clip=0.1", "ref=null")
    assert wrong.returncode == 2
    assert "actor.tao: unknown key; did you mean actor.tau?" in wrong.stderr
    assert "actor.tau: is -1.0; it must be more than 0" in wrong.stderr
    assert "actor.eps_clip: unknown key; it is a setting of grpo, gspo and ppo" in wrong.stderr
    assert "  ref: is null" in wrong.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_dro_runs_a_sweep_from_a_copy(tmp_path):
    script = shutil.copy(DRO, tmp_path / "mine.py")
    small = ["total_train_steps=1", "valid_dataset=null", "trial_name=t", "engine.workers=spawn"]
    done = run_dro(tmp_path, "-m", "actor.tau=0.1,0.2", *small, script=script)
    assert done.returncode == 0, done.stderr
    assert "2 runs in" in done.stdout
    scalars = RunReader(tmp_path / "outputs/quickstart/t/1").steps()[1]
    assert abs(scalars["train/ref_kl"]) < 1e-4  # the reference is the policy as it starts
    assert scalars["train/loss"] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_dro_learns_to_carry(seed, tmp_path):
    done = run_dro(tmp_path, "total_train_steps=50", f"seed={seed}")
    assert done.returncode == 0, done.stderr
    [numbers] = re.findall(r"reward_mean (\S+) -> (\S+), eval_accuracy (\S+) -> (\S+);", done.stderr)
    first, last, before, after = map(float, numbers)
    assert first <= 0.5
    assert last >= 0.8  # tau keeps some of the reference's mistakes
    assert before < 0.3
    assert after >= 0.9
