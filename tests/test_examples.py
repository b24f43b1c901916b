"""What users start from: the GSM8K loader and reward, on the real rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.api import math_reward
from areno.api.data import load_rows
from areno.api.rewards import RewardPool
from areno.api.types import RewardRecord
from areno.api.user_code import load_function
from areno.config.run import DatasetConfig, RewardConfig

ROOT = Path(__file__).parents[1]
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


@needs_gsm8k
@pytest.mark.parametrize("reward", ["examples", "built-in"])
def test_reward_agrees_with_every_label(reward):
    if reward == "examples":
        reward_fn = load_function(str(ROOT / REWARD), "reward_fn", "reward.fn")
    else:
        reward_fn = math_reward.reward_fn
    answers = [json.loads(line)["answer"] for line in GSM8K.open(encoding="utf-8")]
    wrong = []
    for row, answer in zip(gsm8k_rows(), answers, strict=True):
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
    rows = load_rows(DatasetConfig(path="examples/stories", loader="examples/stories/dataset_loader.py"), "prompt")
    assert len({row["prompt"] for row in rows}) == 64
    assert rows[0]["prompt"] == "<s>Once upon a time, there was a little girl named Lily."
    reward_fn = load_function(str(ROOT / "examples/stories/reward.py"), "reward_fn", "reward.fn")
    given = {"A Dog!": 1.0, "two puppies ran": 1.0, "the dogs.": 1.0, "a doge": 0.0, "hotdog": 0.0, "": 0.0}
    assert {text: reward_fn(RewardRecord(completion=text)) for text in given} == given


def test_preferences_of_the_quickstart():
    """One digit of the sum tells the answers apart, and no numbers are in both splits."""
    numbers = {}
    for split in ("train", "test"):
        config = DatasetConfig(
            path="examples/quickstart", split=split, loader="examples/quickstart/dataset_loader.py:preferences"
        )
        rows = load_rows(config, "dpo")
        numbers[split] = {tuple(map(int, row["prompt"][:-1].split("+"))) for row in rows}
        assert len(numbers[split]) == len(rows)
        for row in rows:
            assert int(row["chosen"]) == eval(row["prompt"][:-1])
            assert int(row["rejected"]) == int(row["chosen"]) - 10
    assert len(numbers["train"]) > 9 * len(numbers["test"]) > 3000
    assert not numbers["train"] & numbers["test"]
