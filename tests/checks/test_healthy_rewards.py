"""Rewards and answers that are as they should be: nothing is red. Each case is the clean twin of a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areno.checks.inputs.findings import Finding
from areno.checks.rewards import reward_functions
from tests.helpers import agent_model, checked
from tests.helpers.checked import data_file, failed, findings, red
from tests.helpers.checked_rows import sentences

START = """import re


def last(pattern, text):
    return (re.findall(pattern, text) or [''])[-1]


def reward_fn(sample):
    text, right = sample.completion, sample.solutions
"""
EXACT = "text.strip() == right"
DIGITS = r"last(r'\d+', text) == right"
NEAR = r"abs(float(last(r'-?\d+\.?\d*', text) or 'nan') - float(right)) <= {} * abs(float(right))"
TAGS = "Think in <think> and </think>, then answer in <answer> and </answer>."
Row = Callable[[int], tuple[str, Any]]


@pytest.fixture
def found_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Row, str], list[Finding]]:
    """Check a reward, an expression of `text` and `right`, on 120 rows. No groups are sampled, which takes longest."""
    monkeypatch.setattr(checked, "CHECKS", {"reward": [reward_functions]})

    def run(row: Row, reward: str) -> list[Finding]:
        rows = [dict(zip(("prompt", "solutions"), row(n), strict=True)) for n in range(50, 170)]
        path, file = data_file(tmp_path / "rows.jsonl", rows), tmp_path / "reward.py"
        file.write_text(f"{START}    return float({reward})\n")
        settings = (f"actor.path={agent_model.model_folder()}", f"train_dataset.path={path}", f"reward.fn={file}")
        return findings("gspo prompts", *settings, "valid_dataset=null", only="reward")

    return run


def verdict_of(found: list[Finding], name: str) -> str:
    return next(each.verdict for each in found if each.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "reward", "asked"),
    [
        pytest.param(
            lambda n: (f"Review: {sentences(n)}\nIs it positive or negative?", ["positive", "negative"][n % 2]),
            "text == right",
            "reward-space",
            id="a label that must stand alone",
        ),
        pytest.param(
            lambda n: (f"Estimate the number of words in book {n} of {n}.", str(n * 7919 % 90000 + 1000)),
            NEAR.format(0.05),
            "reward-wrong",
            id="an estimate",
        ),
        pytest.param(
            lambda n: (f"How many words has {sentences(n)}", str(n * 7919 % 90000 + 1000)),
            NEAR.format(0.05),
            "reward-wrong",
            id="a number that cannot be worked out",
        ),
        pytest.param(
            lambda n: (f"What is {n} divided by 7, to two decimals?", f"{n / 7:.2f}"),
            NEAR.format(0.01),
            "",
            id="sorted answers within the tolerance of the next",
        ),
        pytest.param(
            lambda n: (f"What is {n} times {n + 3}?", str(n * (n + 3))),
            DIGITS,
            "reward-wrong",
            id="no answer is negative",
        ),
        pytest.param(
            lambda n: (f"Is {n} divisible by 7? Answer yes or no.", "no" if n % 7 else "yes"),
            EXACT,
            "",
            id="an answer that most rows have stands after 'or'",
        ),
        pytest.param(
            lambda n: (f"Message: {sentences(n)}\nReply with spam or ham.", "ham" if n % 8 else "spam"),
            EXACT,
            "",
            id="a class that most rows have is named last",
        ),
        pytest.param(
            lambda n: (f"Invoice {n}\nTax: {n % 9}\nTotal: {n * 37}\n{sentences(n)}\nWhat is the total?", str(n * 37)),
            DIGITS,
            "told-answers",
            id="extraction",
        ),
        pytest.param(
            lambda n: (
                f"{sentences(n)} The magic number is {n * 79}. {sentences(n + 7)} Which number is it?",
                str(n * 79),
            ),
            DIGITS,
            "told-answers",
            id="a needle",
        ),
        pytest.param(
            lambda n: (
                f"Repeat the last word: {sentences(n).split()[0]} {sentences(n).split()[2]}",
                sentences(n).split()[2],
            ),
            EXACT,
            "told-answers",
            id="copying",
        ),
        pytest.param(
            lambda n: (f"{TAGS} What is {n} plus {n}?", str(2 * n)),
            r"re.sub(r'^<think>\n.+\n</think>\n<answer>\n(.*)\n</answer>$', r'\1', text) == right != text",
            "",
            id="a strict form in lines",
        ),
        pytest.param(
            lambda n: (f"{TAGS.replace('think', 'plan').replace('answer', 'sum')} What is {n} plus {n}?", str(2 * n)),
            r"re.sub(r'^<plan>.+</plan> ?<sum> ?(\d+) ?</sum>$', r'\1', text) == right != text",
            "",
            id="tags of its own",
        ),
    ],
)
def test_nothing_is_red(row: Row, reward: str, asked: str, found_with) -> None:
    found = found_with(row, reward)
    assert not red(found), found
    assert not failed(found)
    assert not asked or verdict_of(found, asked) == "not checked", found
