"""Faults of texts and ratings: what a template wrote already stands in them, or the smallest rating is the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areno.checks.inputs.talks import markers_of
from tests.helpers.checked import data_file, findings, red
from tests.helpers.checked_rows import PAIRS, QUESTIONS, chat_model, dpo, gspo, sft
from tests.helpers.tokenizers import load_tokenizer, trl_templates

ANSWERED = [{"prompt": f"What is {n} plus {n}?", "response": f"It is {2 * n}."} for n in range(100, 140)]


def line_of(found: list[Any], name: str) -> str:
    return next(each.line for each in found if each.name == name)


def changed(rows: list[dict[str, Any]], field: str, form: str) -> list[dict[str, Any]]:
    return [{**row, field: form.format(row[field])} for row in rows]


def test_prompts_that_are_already_rendered_are_found(tmp_path: Path) -> None:
    assert not red(sft(tmp_path / "twin", rows=ANSWERED))
    rows = changed(ANSWERED, "prompt", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
    found = sft(tmp_path / "own", rows=rows)
    assert red(found) == {"template-markers"}
    assert "40 of 40 rows contain '<|im_start|>assistant': they are already rendered" in line_of(
        found, "template-markers"
    )
    found = sft(tmp_path / "other", rows=changed(ANSWERED, "prompt", "[INST] {} [/INST]"))
    assert red(found) == {"template-markers"}
    assert "for another chat template" in line_of(found, "template-markers")


def test_prompts_of_a_rollout_that_are_already_rendered_are_found(tmp_path: Path) -> None:
    path = data_file(tmp_path / "rendered.jsonl", changed(QUESTIONS, "prompt", "<|im_start|>user\n{}<|im_end|>\n"))
    assert "template-markers" in red(gspo(tmp_path / "faulty", f"train_dataset.path={path}"))


def test_a_row_may_write_about_templates(tmp_path: Path) -> None:
    about = [{"prompt": "What does <|im_start|> mean?", "response": "It begins a turn, and <|im_end|> ends it."}]
    assert not red(sft(tmp_path, rows=[*ANSWERED, *about]))


@pytest.mark.parametrize("name", ["qwen3", "tiny"])
def test_each_template_has_marks(name: str) -> None:
    tokenizer = load_tokenizer(name)
    assert "<|im_start|>assistant" in markers_of(tokenizer)
    for tokenizer.chat_template in trl_templates().values():
        assert all("think" not in mark and "question" not in mark for mark in markers_of(tokenizer))


def test_an_end_token_in_the_text_of_answers_is_found(tmp_path: Path) -> None:
    found = dpo(tmp_path, changed(PAIRS, "chosen", "{}<|im_end|>"))
    assert red(found) == {"end-tokens"}
    assert "40 of 80 answers (all of them chosen)" in line_of(found, "end-tokens")


@pytest.mark.parametrize(
    ("field", "form", "said"),
    [
        ("chosen", "{}\n", "end with white space"),
        ("rejected", "{} and", "end within a sentence"),
        ("rejected", "<think>\n{}", "contain <think>"),
        ("chosen", "{} [A]", "end"),
    ],
)
def test_a_mark_of_one_side_of_pairs_is_found(field: str, form: str, said: str, tmp_path: Path) -> None:
    found = dpo(tmp_path, changed(PAIRS, field, form))
    assert "pair-marks" in red(found)
    assert said in line_of(found, "pair-marks")


def rated(folder: Path, ratings: list[Any], column: str) -> list[Any]:
    folder.mkdir(exist_ok=True)
    rows = [
        {"prompt": f"{n} plus {n}?", "answers": [f"It is {2 * n}.", f"It is {n}.", "No."], column: ratings}
        for n in range(100, 140)
    ]
    files = [f"actor.path={chat_model(folder)}", f"train_dataset.path={data_file(folder / 'rows.jsonl', rows)}"]
    more = ("valid_dataset=null", "train_dataset.batch_size=4")
    return findings("rw ratings", *files, *more, f"train_dataset.columns.ratings={column}")


def test_ranks_that_are_read_as_ratings_are_found(tmp_path: Path) -> None:
    assert not red(rated(tmp_path / "twin", [8.5, 2, 1], "score"))
    found = rated(tmp_path / "ranks", [1, 2, 3], "rank")
    assert red(found) == {"rating-order"}
    assert "1 would be the worst" in line_of(found, "rating-order")
    assert red(rated(tmp_path / "losses", [0.3, 0.7, 1.4], "mean_loss")) == {"rating-order"}
    found = rated(tmp_path / "unclear", [3, 2, 1], "score")
    assert [each.verdict for each in found if each.name == "rating-order"] == ["not checked"]


def test_columns_that_an_export_cut_are_found(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n}?", "response": f"It is {n}, and more. " * (1 + n % 23) + "."} for n in range(400)]
    assert not red(sft(tmp_path / "twin", rows=rows))
    found = sft(tmp_path / "cut", rows=[{**row, "response": row["response"][:200]} for row in rows])
    assert red(found) == {"cut-texts"}
    assert "of 'response' have exactly 200 characters" in line_of(found, "cut-texts")


def test_prompts_that_hold_their_answer_are_found(tmp_path: Path) -> None:
    solved = [{**row, "answer": f"We add {n} twice, and so it is {2 * n}."} for n, row in enumerate(QUESTIONS, 100)]
    joined = [{**row, "prompt": f"{row['prompt']} {row['answer']}"} for row in solved]
    paths = [data_file(tmp_path / f"{name}.jsonl", rows) for name, rows in (("twin", solved), ("joined", joined))]
    assert not red(gspo(tmp_path / "twin", f"train_dataset.path={paths[0]}"))
    found = gspo(tmp_path / "faulty", f"train_dataset.path={paths[1]}")
    assert red(found) == {"given-answers"}
    assert "40 of 40 prompts contain the answer" in line_of(found, "given-answers")


def test_answers_that_are_all_the_same_are_found(tmp_path: Path) -> None:
    assert red(sft(tmp_path / "sft", rows=[{**row, "response": "I do not know."} for row in ANSWERED])) == {
        "same-answers"
    }
    equal = [{**row, "rejected": row["chosen"]} if n < 4 else row for n, row in enumerate(PAIRS)]
    assert not red(dpo(tmp_path / "dpo", equal))  # pairs of equal answers are left out
