"""Flags and words that a command does not know: what is meant is named."""

from __future__ import annotations

import pytest

from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.launch import command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --dataset rows.jsonl", "--dataset: there is no such flag; did you mean --dataset-path"),
        ("train --learning-rate 1e-5 --num-generations 4", "--learning-rate: there is no such flag; here it is --lr\n"),
        ("train --num-generations 4", "--num-generations: there is no such flag; here it is --n-samples\n"),
        ("plan --max-steps 3 --num-generations=4", "--num-generations: there is no such flag; here it is --n-samples"),
        ("trace x --jso", "--jso: there is no such flag; did you mean --json"),
    ],
)
def test_flags_that_do_not_exist(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_options_of_recipes_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(get_algorithm("sft"), "sft", ["--learning-rate", "3"])
    assert ended.value.code == 2
    text = "--learning-rate: there is no such option; settings are given as key=value, here actor.optimizer.lr=..."
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan gspo --config-name quickstart -m seed=1,2", "-m: starts a sweep, and areno plan gspo is about one run"),
        (
            "plan gspo --config-name quickstart --answer-tokens 16 --prompt-tokens 127",
            "error: a prompt of 127 and an answer of 16 tokens are more than the 128 tokens of the model's context",
        ),
        ("trace /nonexistent", "error: there is no folder /nonexistent"),
    ],
)
def test_mistakes_are_told_in_the_words_of_the_command(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) in (1, 2)
    assert message in capsys.readouterr().err
