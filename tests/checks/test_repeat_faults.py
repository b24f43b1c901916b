"""Faults in what rows share: repeated rows, solutions, labels and forms of prompts. Each is found by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checked import data_file, findings, red
from tests.helpers.checked_rows import QUESTIONS, chat_model, dpo, gspo, sft

END = "\nPut the final answer at the end."
KNOWN = [{"prompt": f"What is {n} plus {n}?", "response": f"It is {2 * n}."} for n in range(100, 140)]


def rolled(folder: Path, rows: list[dict[str, Any]], valid: list[dict[str, Any]] | None = None) -> set[str]:
    folder.mkdir()
    settings = [f"train_dataset.path={data_file(folder / 'train.jsonl', rows)}"]
    held_out = "null" if valid is None else f"{{path: {data_file(folder / 'valid.jsonl', valid)}}}"
    return red(gspo(folder / "run", *settings, valid=held_out))


def test_a_row_that_is_repeated_is_found(tmp_path: Path) -> None:
    assert red(sft(tmp_path, rows=[*KNOWN, *KNOWN[:1] * 30])) == {"repeated-rows"}


def test_solutions_that_cannot_be_right_are_found(tmp_path: Path) -> None:
    assert rolled(tmp_path / "same", [{**row, "solutions": "72"} for row in QUESTIONS]) == {"contradictions"}
    prompt = [{**row, "prompt": QUESTIONS[0]["prompt"]} for row in QUESTIONS]
    assert rolled(tmp_path / "prompt", prompt) == {"contradictions"}
    assert not rolled(tmp_path / "toy", QUESTIONS[:10] * 4)


@pytest.mark.parametrize("label", [lambda n: True, lambda n: n % 2 == 1])
def test_labels_that_say_nothing_or_the_opposite_are_found(label: Any, tmp_path: Path) -> None:
    def checked(folder: Path, of_row: Any) -> set[str]:
        folder.mkdir()
        rows = [
            {**row, "response": f"It is {2 * n + n % 2}, I think.", "label": of_row(n), "score": 9 - 8 * (n % 2)}
            for n, row in enumerate(KNOWN)
        ]
        files = [f"actor.path={chat_model(folder)}", f"train_dataset.path={data_file(folder / 'rows.jsonl', rows)}"]
        return red(findings("kto labels", *files, "valid_dataset=null"))

    assert not checked(tmp_path / "twin", lambda n: n % 2 == 0)
    assert checked(tmp_path / "faulty", label) == {"labels"}


def test_validation_that_asks_otherwise_is_found(tmp_path: Path) -> None:
    asked = [{**row, "prompt": f"{row['prompt']}{END}"} for row in QUESTIONS]
    others = [{"prompt": f"What is the double of {n}?", "solutions": str(2 * n)} for n in range(200, 240)]
    assert not rolled(tmp_path / "twin", asked, [{**row, "prompt": f"{row['prompt']}{END}"} for row in others])
    assert rolled(tmp_path / "form", asked, others) == {"validation-form"}


def test_validation_questions_in_another_form_are_found(tmp_path: Path) -> None:
    long = [{**row, "prompt": f"A farmer has as many cows as sheep: {row['prompt']}"} for row in QUESTIONS]
    asked = [{**row, "prompt": f"{row['prompt']}{END}"} for row in long]
    valid = [{**row, "prompt": f"Answer this question.\n{row['prompt']}{END}"} for row in long[:30]]
    assert "validation-rows" in rolled(tmp_path / "faulty", asked, valid)


def test_pairs_that_their_length_tells_apart_are_found(tmp_path: Path) -> None:
    said = "We add the number to itself, as the question says, and write down what comes out: "
    pairs = [
        {"prompt": f"What is {n} plus {n}?", "chosen": f"{said}{2 * n}.", "rejected": f"{said}{said}{said}{n}."}
        for n in range(100, 140)
    ]
    found = dpo(tmp_path, pairs)
    assert red(found) == {"pair-marks"}
    assert "the rejected answer is the longer one" in next(each.line for each in found if each.name == "pair-marks")
