"""Faults of preferences: answers that are the same or told apart by a mark, and labels that scores contradict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areno.checks.data import pair_differences, row_scores
from tests.helpers import checked
from tests.helpers.checked import data_file, findings
from tests.helpers.checked_rows import chat_model, dpo, sentences

CLEAN = [
    {"prompt": f"Tell me about {n}.", "chosen": sentences(n), "rejected": sentences(n + 1000)} for n in range(1, 61)
]
Change = Callable[[dict[str, Any], int], dict[str, Any]]


@pytest.fixture
def found_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checks = [pair_differences.same_pairs, pair_differences.pair_marks, row_scores.pair_scores, row_scores.labels]
    monkeypatch.setattr(checked, "CHECKS", {"data": checks})

    def run(rows: list[dict[str, Any]], kind: str = "dpo") -> dict[str, str]:
        if kind == "dpo":
            found = dpo(tmp_path, rows)
        else:
            files = [
                f"actor.path={chat_model(tmp_path)}",
                f"train_dataset.path={data_file(tmp_path / 'rows.jsonl', rows)}",
            ]
            found = findings("kto labels", *files, "valid_dataset=null")
        return {each.name: each.line for each in found if each.verdict == "red"}

    return run


@pytest.mark.parametrize(
    ("change", "name", "line"),
    [
        (lambda row, n: {}, "", ""),
        (lambda row, n: {"chosen": f"Sure! {row['chosen']}"} if n % 10 else {}, "pair-marks", "begin with 'Sure!'"),
        (lambda row, n: {"chosen": row["chosen"].replace(". ", ". Indeed ")}, "pair-marks", "the word 'indeed'"),
        (lambda row, n: {"rejected": row["rejected"].lower()}, "pair-marks", "have no capital letter"),
        (lambda row, n: {"chosen": 2 * row["chosen"]}, "pair-marks", "is the longer one in"),
        (
            lambda row, n: {"chosen": f"[GOOD] {row['chosen']}", "rejected": f"[BAD] {row['rejected']}"},
            "pair-marks",
            "",
        ),
        (lambda row, n: {"chosen": f"{row['chosen']}\n\nI hope it helps!"}, "pair-marks", "end with 'helps!'"),
        (lambda row, n: {"chosen": f"{row['chosen']}\u00a0"}, "pair-marks", "white space"),
        (lambda row, n: {"chosen": f"{row['chosen']}\r\nSo."}, "pair-marks", "contain '\\r'"),
        (lambda row, n: {"rejected": row["rejected"][:-20]}, "pair-marks", "end within a sentence"),
        (lambda row, n: {"rejected": row["chosen"]} if n % 3 == 0 else {}, "same-pairs", "the same text"),
        (lambda row, n: {"rejected": f"{row['chosen'].lower()} "} if n % 10 == 0 else {}, "same-pairs", "in 6 of 60"),
        (lambda row, n: {"scores": {"chosen": 7 * (n % 9 > 0), "rejected": 2}}, "pair-scores", "in 7 of 60 pairs"),
        (lambda row, n: {"scores": {"chosen": 7, "rejected": 2}}, "", ""),
        (
            lambda row, n: {"chosen_avg_rating": 4.5 * (n > 9), "rejected_avg_rating": 3.0},
            "pair-scores",
            "in 10 of 60 pairs",
        ),
        (lambda row, n: {"score_diff": -1 if n < 5 else 2.5}, "pair-scores", "in 5 of 60 pairs"),
        (lambda row, n: {"chosen_loss": 1.5, "rejected_loss": 2.5, "chosen_tokens": 3, "rejected_tokens": 9}, "", ""),
    ],
)
def test_a_fault_of_pairs_is_found(change: Change, name: str, line: str, found_of) -> None:
    found = found_of([row | change(row, n) for n, row in enumerate(CLEAN)])
    assert set(found) == ({name} if name else set()), found
    assert line in found.get(name, "")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda row, n: {"chosen": f"I'm sorry, but I can't. {row['chosen']}"}, 'begin with "I\'m"'),
        (lambda row, n: {"chosen": row["chosen"].replace(". ", ".\n\n")}, "contain '\\n'"),
        (
            lambda row, n: {"chosen": f"{row['chosen']} **Note** {sentences(n + 300)}"} if n % 20 else {},
            "longer one in 97%",
        ),
        (lambda row, n: {"chosen": json.dumps({"answer": n, "why": row["chosen"]})}, "begin with '{\"answer\":'"),
        (lambda row, n: {"chosen": "Paris"}, "the rejected answer is the longer one"),
    ],
)
def test_what_pairs_may_be_meant_to_teach_is_asked_about(change: Change, line: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [pair_differences.pair_marks]})
    [found] = dpo(tmp_path, [row | change(row, n) for n, row in enumerate(CLEAN)])
    assert found.verdict == "not checked", found
    assert "is this what the run should teach?" in found.line
    assert line in found.line


LABELLED = [
    {"prompt": row["prompt"], "response": row[side], "label": side == "chosen", "score": 2 + 5 * (side == "chosen")}
    for row in CLEAN
    for side in ("chosen", "rejected")
]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda row, n: {}, ""),
        (lambda row, n: {"score": n % 7}, ""),  # a score of something else
        (lambda row, n: {"label": not row["label"]} if n < 12 else {}, "is 7 or more, except in 12 of 120 rows"),
        (lambda row, n: {"label": not row["label"]}, "'score' of the good ones is on average 2"),
        (lambda row, n: {"label": n == 5, "score": 0}, "hardly anything tells one from the other"),
        (lambda row, n: {"response": LABELLED[n - n % 2]["response"], "score": 0}, "60 of 60 answers have both labels"),
    ],
)
def test_a_fault_of_labels_is_found(change: Change, line: str, found_of) -> None:
    found = found_of([row | change(row, n) for n, row in enumerate(LABELLED)], kind="kto")
    assert set(found) == ({"labels"} if line else set()), found
    assert line in found.get("labels", "")


def test_a_few_noisy_scores_of_many_pairs_are_not_red(found_of) -> None:
    rows = [row | {"prompt": f"{n}: {row['prompt']}"} for n in range(4) for row in CLEAN]
    scored = [row | {"score_chosen": 8, "score_rejected": 8.5 if n == 7 else 5} for n, row in enumerate(rows)]
    assert not found_of(scored)


def test_a_few_users_who_change_their_mind_are_not_red(found_of) -> None:
    rows = [row | {"response": f"{n}: {row['response']}"} for n in range(4) for row in LABELLED]
    again = [row | {"label": not row["label"]} for row in rows[:4]]
    assert not found_of([*rows, *again], kind="kto")
