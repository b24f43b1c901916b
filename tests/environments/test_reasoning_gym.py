"""Generators of the real package reasoning-gym: rows that depend on a seed alone, and the scores of the package."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areno.config.datasets import DatasetConfig
from areno.data.sources import load_rows
from areno.environments.package import LazyRows
from areno.environments.packages import package_of
from areno.environments.reasoning_gym import EVALUATED
from areno.errors import ConfigError, DataError
from areno.run.states import rows_fingerprint
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import play

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra reasoning-gym"),
]
# One of each kind: partial scores, no answer, tuples in an entry, other rows by the hash seed, questions from a file.
FIVE = ["basic_arithmetic", "graph_color", "spiral_matrix", "isomorphic_strings", "gsm_symbolic"]


def rows(name: str, split: str = "train", **options: Any) -> LazyRows:
    found = load_rows(
        DatasetConfig(path=f"reasoning_gym:{name}", split=split, dataset_kwargs=options or None), "prompt"
    )
    assert isinstance(found, LazyRows)
    return found


def score(row: dict[str, Any], answer: str) -> float:
    environment = package_of(f"reasoning_gym:{row['generator']}", "reward.fn")
    assert environment is not None
    found = environment.reward()(SimpleNamespace(record=row, final_answer=answer))
    assert isinstance(found, float | int)
    return found


@pytest.mark.parametrize("name", FIVE)
def test_rows_and_scores_are_those_of_the_package(name: str) -> None:
    """A process with another hash seed makes the same rows, and the package scores alike."""
    script = f"""
import reasoning_gym, pickle, sys
found = reasoning_gym.create_dataset({name!r}, size=30, seed=5)
pickle.dump([found[i] for i in range(30)], sys.stdout.buffer)
"""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    made = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
    entries = pickle.loads(made)
    dataset = importlib.import_module("reasoning_gym").create_dataset(name, size=30, seed=5)
    found, held_out = rows(name, size=30, seed=5), rows(name, "test", size=5, seed=5)
    taken = [index for index in range(30) if found[index]["entry"] == entries[index]]
    assert len(taken) > 12  # about three quarters: the others are questions of the test split
    asked = {row["entry"]["question"] for row in (found[index] for index in range(30))}
    assert asked.isdisjoint(held_out[index]["entry"]["question"] for index in range(5))
    for index in taken[:4]:
        row, entry = found[index], entries[index]
        assert row["prompt"][1] == {"role": "user", "content": entry["question"]}
        assert row["solutions"] == entry["answer"]
        for answer in (entry["answer"] or "A=1", "no", f"{entry['answer']} or so"):
            assert score(row, answer) == dataset.score_answer(answer, entry)
            assert score(row, f"<think><answer>7</answer></think>So <answer> {answer}\n</answer>!") == score(
                row, answer
            )


def test_an_answer_that_the_package_cannot_read_is_wrong() -> None:
    row = rows("prime_factorization")[0]
    assert (score(row, row["solutions"]), score(row, "no number")) == (1.0, 0.0)
    row["entry"] = {**row["entry"], "answer": "broken"}
    with pytest.raises(ValueError, match="invalid literal"):
        score(row, "no number")


def test_rows_are_made_when_they_are_read() -> None:
    """A row of this generator takes a second."""
    found = rows("knight_swap", size=100_000)
    assert len(found) == 100_000
    assert rows_fingerprint(found) == rows_fingerprint(rows("knight_swap", size=100_000))
    assert rows_fingerprint(found) != rows_fingerprint(rows("knight_swap", size=100_000, seed=1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("basic_arithmetik", {}, r"train_dataset.path: reasoning_gym:basic_arithmetik does not exist; did you mean"),
        ("composite", {}, r"train_dataset.path: reasoning_gym:composite mixes other generators"),
        ("countdown", {"nubers": 1}, r"train_dataset.dataset_kwargs.nubers: is no option of reasoning_gym:countdown"),
        ("countdown", {"size": 0}, r"train_dataset.dataset_kwargs.size: is 0; a whole number of at least 1"),
        ("countdown", {"min_numbers": 9, "max_numbers": 2}, r"train_dataset.dataset_kwargs: is not accepted by"),
        ("countdown", {"system_prompt": 3}, r"train_dataset.dataset_kwargs.system_prompt: is 3; a text, a name or"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows(name, **options)


def test_prompts_and_splits() -> None:
    assert isinstance(rows("gcd", system_prompt=None)[0]["prompt"], str)
    assert rows("gcd", system_prompt="Be short.")[0]["prompt"][0]["content"] == "Be short."
    assert "<answer>" in rows("gcd")[0]["prompt"][0]["content"]
    with pytest.raises(ConfigError, match=r"train_dataset.split: is 'dev'; reasoning_gym:gcd has train and test"):
        rows("gcd", "dev")
    environment = package_of("reasoning_gym:lcm")
    assert environment is not None
    reward, record = environment.reward(), SimpleNamespace(record=rows("gcd")[0], final_answer="1")
    with pytest.raises(DataError, match="its row is not of reasoning_gym:lcm"):
        reward(record)


@pytest.mark.parametrize("name", FIVE)
def test_training(tmp_path: Path, name: str) -> None:
    played = play(
        "gspo",
        tmp_path / "run",
        f"train_dataset.path=reasoning_gym:{name}",
        "train_dataset.max_length=null",
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        "gconfig.max_tokens=2000",
        "saver.freq_steps=null",
        task="environment",
    )
    assert played.series("rollout/reward_errors") == [0.0, 0.0]
    assert [len(samples) for samples in (played.samples(1), played.samples(2))] == [16, 16]


def test_the_generators_that_evaluate_answers_are_known() -> None:
    import reasoning_gym

    found = set()
    for file in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        scores = text.partition("def score_answer")[2]
        if re.search(r"(?<![\w.])eval\(|(?<![\w])parse_expr\(|sympify\(", scores):
            found.add(file.stem)
    assert (
        found - {"number_sorting", "propositional_logic"} == EVALUATED
    )  # the others evaluate the right answer, or parse
