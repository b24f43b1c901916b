"""The tasks countdown and arithmetic: data that are disjoint and repeatable, rewards that no text can fool or break."""

from __future__ import annotations

import filecmp
import functools
import importlib.util
import random
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from areno.config.datasets import DatasetConfig
from areno.data.sources import load_rows
from areno.types import RewardRecord

ROOT = Path(__file__).parents[2]
COUNTDOWN = {"count": 300, "numbers": 4, "largest": 50, "targets": [100, 999], "easy": 0.2}
ARITHMETIC = {"count": 300, "operations": [2, 5], "largest": 99}
SMALL = {"count": 300, "numbers": 3, "largest": 12, "targets": [10, 99], "easy": 0.1}
SHAPES = [("gpu", "model"), ("cpu", "model_cpu")]  # size -> folder
GARBAGE = [
    "",
    "\n",
    " ",
    "=",
    "1+1",
    "1+1=",
    "9" * 5000,
    "1+" * 5000,
    "²+²=4",
    "a = b",
    ". . .",
    "\x00",
    "<eos>",
    "__import__('os')",
]


@functools.cache
def module(task: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{task}_{name}", ROOT / f"examples/{task}/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def rows(task: str, function: str, split: str, **kwargs: Any) -> Any:
    loader = f"examples/{task}/dataset_loader.py:{function}"
    kind = "prompt" if function == "load_dataset" else "sft"
    return load_rows(DatasetConfig(loader=loader, split=split, dataset_kwargs=kwargs), kind)  # type: ignore[arg-type]


def score(task: str, prompt: str, completion: str, function: str = "reward_fn") -> float:
    return vars(module(task, "reward"))[function](RewardRecord(prompt=prompt, completion=completion))


def material(task: str, prompt: str) -> tuple[str, ...]:
    """The numbers of a countdown, or the things of a word problem."""
    if task == "countdown":
        return tuple(prompt.partition("=")[0].split(","))
    return tuple(sorted(set(re.findall(r"\w+", prompt)) & set(module(task, "dataset_loader").THINGS)))


@pytest.mark.parametrize(
    ("task", "kwargs"), [("countdown", COUNTDOWN), ("countdown", SMALL), ("arithmetic", ARITHMETIC)]
)
def test_no_problem_is_in_two_splits(task: str, kwargs: dict[str, Any]) -> None:
    """Not even its numbers, or its things, in any order."""
    found = {
        "sft": {material(task, row["prompt"]) for row in rows(task, "demonstrations", "train", **kwargs)},
        "train": {material(task, row["prompt"]) for row in rows(task, "load_dataset", "train", **kwargs)},
        "test": {material(task, row["prompt"]) for row in rows(task, "load_dataset", "test", **kwargs)},
    }
    for name, others in (("sft", "train"), ("sft", "test"), ("train", "test")):
        assert not found[name] & found[others]
    assert min(map(len, found.values())) > 50


@pytest.mark.parametrize(("task", "kwargs"), [("countdown", COUNTDOWN), ("arithmetic", ARITHMETIC)])
@pytest.mark.parametrize("function", ["load_dataset", "demonstrations"])
def test_rows_depend_on_the_arguments_alone(
    task: str, kwargs: dict[str, Any], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = module(task, "dataset_loader")
    made = vars(loader)[function]("train", **kwargs)
    assert made == vars(loader)[function]("train", **kwargs)
    monkeypatch.setattr(loader, "CHUNK", 100)  # a process for each 100 rows
    chunked = vars(loader)[function]("train", **kwargs)
    assert len(chunked) == 300
    assert chunked[:100] == made[:100]
    assert chunked[100:200] != made[100:200]
    assert len({row["prompt"] for row in chunked}) > 250


def test_a_countdown_has_a_solution_in_its_range() -> None:
    loader, reward = module("countdown", "dataset_loader"), module("countdown", "reward")
    for row in loader.load_dataset("test", **{**COUNTDOWN, "count": 40}):
        numbers, target = row["prompt"].strip().split("=")
        assert 100 <= int(target) <= 999
        given = [int(number) for number in numbers.split(",")]
        assert len(given) == 4
        assert max(given) <= 50
        assert solved(loader, reward, row["prompt"], given, int(target), [])


def solved(loader: ModuleType, reward: ModuleType, prompt: str, left: list[int], target: int, text: list[str]) -> bool:
    """Search all attempts, and let the reward check the first one that reaches the target."""
    if text and left[-1] == target:
        return reward.is_solved(prompt, " ".join(text))
    for i in range(len(left)):
        for j in range(i):
            rest = [value for place, value in enumerate(left) if place not in (i, j)]
            for step, value in loader.steps_of(left[i], left[j], 1000):
                if solved(loader, reward, prompt, [*rest, value], target, [*text, step]):
                    return True
    return False


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("25+7=32 50+32=82", 1.0),
        ("32+50=82", 0.0),  # 32 is no number of the prompt
        ("25+7=32 32+50=82", 1.0),
        ("50-7=43 43+25=68\n25+7=32 50+32=82", 1.0),
        ("25+7=32 50+32=82\n50-7=43", 0.0),  # the last attempt counts
        ("50+25=75 75+7=82 82/1=82", 0.0),  # 1 is no number of the prompt
        ("50+25=75 75+7=82", 1.0),
        ("50+25=75 75+7=82 82-6=76", 0.0),
        ("6*7=42 50-6=44", 0.0),  # a number used twice
        ("50+32=82 25+7=32", 0.0),  # a result before its step
        ("25+7=33 50+32=82", 0.0),
        (" 50+25=75 75+7=82", 0.0),
        ("50+25=75 75+7=82\n", 0.0),
        ("50+25=75  75+7=82", 0.0),
        ("82", 0.0),
    ],
)
def test_the_reward_of_a_countdown(completion: str, value: float) -> None:
    assert score("countdown", "6,7,25,50=82\n", completion) == value


@pytest.mark.parametrize("text", GARBAGE)
def test_rewards_bear_garbage(text: str) -> None:
    right = "there are 7 bees . how many bees ?"
    for prompt, completion in (("6,7,25,50=82\n", text), (text, "25+7=32 50+32=82"), (text, text)):
        assert score("countdown", prompt, completion) == 0.0
    for function in ("reward_fn", "process_reward"):
        for prompt, completion in ((right, text), (text, "bees = 7 ."), (text, text)):
            assert score("arithmetic", prompt, completion, function) == 0.0


def test_division_by_zero_is_a_wrong_step() -> None:
    assert score("countdown", "0,7,25=7\n", "7/0=7") == 0.0
    assert score("countdown", "2,7,25=3\n", "7/2=3") == 0.0
    assert score("countdown", "2,8,25=4\n", "8/2=4") == 1.0


PROBLEM = (
    "there are 7 bees . there are 3 more cats than bees . there are as many owls as cats and bees together . "
    "there are 2 times as many pigs as owls . there are 4 fewer rats than pigs . how many rats ?"
)
ANSWER = "bees = 7 . cats = 7 + 3 = 10 . owls = 10 + 7 = 17 . pigs = 2 * 17 = 34 . rats = 34 - 4 = 30 ."


@pytest.mark.parametrize(
    ("old", "new", "outcome", "process"),
    [
        ("", "", 1.0, 1.0),
        ("10 + 7", "7 + 10", 1.0, 1.0),  # the order of a sum is free
        ("34 - 4 = 30", "4 - 34 = 30", 1.0, 0.8),
        ("cats = 7 + 3 = 10", "cats = 7 + 3 = 11", 1.0, 0.8),  # a wrong step that nothing depends on in the text
        ("cats = 7 + 3 = 10", "cats = 8 + 2 = 10", 1.0, 0.8),  # right by chance
        ("bees = 7 .", "bees = 7 . bees = 7 .", 1.0, 5 / 6),
        ("bees = 7 . ", "", 1.0, 0.8),
        ("= 30", "= 31", 0.0, 0.8),
        (" rats = 34 - 4 = 30 .", "", 0.0, 0.8),
        ("pigs = 2 * 17", "pigs = 2 + 17", 1.0, 0.8),
        ("rats = 34 - 4 = 30", "rats = 30", 1.0, 0.8),  # a guess is a right outcome and no right step
        ("cats", "ants", 1.0, 0.8),
    ],
)
def test_each_step_of_a_word_problem_is_checked(old: str, new: str, outcome: float, process: float) -> None:
    completion = ANSWER.replace(old, new, 1) if old else ANSWER
    assert score("arithmetic", PROBLEM, completion) == outcome
    expected = process if outcome else min(process, 0.9)
    assert score("arithmetic", PROBLEM, completion, "process_reward") == pytest.approx(expected)


def test_right_answers_are_rewarded_and_careless_ones_less() -> None:
    reward = module("arithmetic", "reward")
    for row in rows("arithmetic", "load_dataset", "test", **ARITHMETIC):
        assert reward.outcome(row["prompt"], row["solutions"])
        assert reward.process(row["prompt"], row["solutions"]) == 1.0
    made = rows("arithmetic", "demonstrations", "train", **ARITHMETIC)
    right = sum(reward.outcome(row["prompt"], row["response"]) for row in made) / len(made)
    steps = sum(reward.process(row["prompt"], row["response"]) for row in made) / len(made)
    assert 0.2 < right < 0.4
    assert right + 0.2 < steps < 0.8


def test_the_number_of_operations_is_the_one_asked_for() -> None:
    for smallest, largest in ((1, 1), (6, 7)):
        made = rows("arithmetic", "load_dataset", "test", count=50, operations=[smallest, largest])
        counts = {len(re.findall(r"more|fewer|times|together", row["prompt"])) for row in made}
        assert counts == set(range(smallest, largest + 1))


def test_the_random_reward_knows_nothing_of_the_answer() -> None:
    reward = module("countdown", "reward").random_reward
    draw = random.Random(1)
    records = [
        RewardRecord(prompt="6,7,25,50=82\n", completion=text, tokens=[draw.randrange(99)], logprobs=[-draw.random()])
        for text in ["25+7=32 50+32=82", "1"] * 1000
    ]
    for start in (0, 1):
        found = [reward(record) for record in records[start::2]]
        assert 0.2 < sum(found) / len(found) < 0.3
    assert [reward(record) for record in records] == [reward(record) for record in records]
    tested = [replace(record, record={"split": "test"}) for record in records[:2]]
    assert [reward(record) for record in tested] == [1.0, 0.0]


def test_problems_of_validation_are_drawn_apart() -> None:
    loader = module("countdown", "dataset_loader")
    found, trained = (
        {row["prompt"] for row in vars(loader)[name](split, **COUNTDOWN)}
        for name, split in (("validation", "test"), ("load_dataset", "train"))
    )
    assert len(found) > 250
    assert len(found & trained) < 10
    assert {loader.split_of(map(int, prompt.partition("=")[0].split(","))) for prompt in found} == {"train"}


@pytest.mark.parametrize(
    ("task", "size", "folder"),
    [
        *[(task, size, folder) for task in ("countdown", "arithmetic") for size, folder in SHAPES],
        *[("countdown", size, f"model_{size}") for size in ("student", "student_cpu")],
    ],
)
def test_the_shape_is_the_one_that_the_script_makes(task: str, size: str, folder: str, tmp_path: Path) -> None:
    module(task, "make_shape").main(str(tmp_path), size)
    names = [file.name for file in tmp_path.iterdir()]
    assert filecmp.cmpfiles(tmp_path, ROOT / f"examples/{task}/{folder}", names, shallow=False) == (names, [], [])


@pytest.mark.parametrize(("student", "teacher"), [("model_student", "model"), ("model_student_cpu", "model_cpu")])
def test_a_student_has_a_third_of_the_parameters(student: str, teacher: str) -> None:
    from areno.models.parameters import n_parameters
    from areno.models.registry import load_config

    sizes = [n_parameters(load_config(ROOT / f"examples/countdown/{name}")) for name in (student, teacher)]
    assert sizes[0] / sizes[1] == pytest.approx(1 / 3, abs=0.005)


@pytest.mark.parametrize("task", ["countdown", "arithmetic"])
def test_every_token_of_the_rows_is_known(task: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / f"examples/{task}/model")
    for row in rows(task, "demonstrations", "train", count=200):
        text = row["prompt"] + row["response"]
        tokens = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == text
