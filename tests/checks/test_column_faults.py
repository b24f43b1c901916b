"""Faults of columns: cut at a number of tokens, calls of tools in texts, answers unlike the worked text beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areno.data import messages
from areno.server import messages as server_messages
from tests.helpers.checked import data_file, red
from tests.helpers.checked_rows import QUESTIONS, dpo, gspo, sft
from tests.helpers.tokenizers import load_tokenizer


def line_of(found: list[Any], name: str) -> str:
    return next(each.line for each in found if each.name == name)


def talked(n: int, side: str) -> str:
    """A text of several sentences whose length varies, unlike that of the others."""
    words = [f"{side}{n * 7 % 31}", f"thing{n % 13}", f"place{n % 17}"]
    return " ".join(f"The {words[k % 3]} is {n * k % 19} of {words[(k + n) % 3]}." for k in range(3 + n * 5 % 29))


def test_answers_of_one_side_that_a_number_of_tokens_has_cut_are_found(tmp_path: Path) -> None:
    pairs = [{"prompt": f"Tell me of {n}.", "chosen": talked(n, "a"), "rejected": talked(n, "b")} for n in range(200)]
    assert "cut-texts" not in red(dpo(tmp_path / "twin", pairs))
    tokenizer = load_tokenizer("tiny")

    def cut(text: str) -> str:
        return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:128])

    def words(text: str) -> str:
        return " ".join(text.split()[:63])

    for name, change in (("tokens", cut), ("words", words)):
        found = dpo(tmp_path / name, [{**row, "rejected": change(row["rejected"])} for row in pairs])
        lines = [each.line for each in found if each.name == "cut-texts"]
        assert all("'rejected'" in line for line in lines)
        assert f"texts of 'rejected' have {128 if name == 'tokens' else 63} {name}" in lines[0]


CALL = {"name": "add", "arguments": {"text": "1+1"}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def called(n: int, said: dict[str, Any]) -> dict[str, Any]:
    talk = [{"role": "user", "content": f"What is {n} plus {n}?"}, {"role": "assistant", **said}]
    talk += [{"role": "tool", "content": f"{2 * n}"}, {"role": "assistant", "content": f"It is {2 * n}."}]
    return {"messages": talk, "tools": TOOLS}


@pytest.mark.parametrize("form", ["{}", "I add.\n{}", "```json\n{}\n```"])
def test_calls_of_tools_that_stand_in_texts_are_found(form: str, tmp_path: Path) -> None:
    calls = [{"type": "function", "function": CALL}]
    assert not red(sft(tmp_path / "twin", rows=[called(n, {"content": "", "tool_calls": calls}) for n in range(40)]))
    rows = [called(n, {"content": form.format(json.dumps(CALL))}) for n in range(40)]
    found = sft(tmp_path / "faulty", rows=rows)
    assert red(found) == {"written-calls"}
    assert "40 calls of tools in 40 rows" in line_of(found, "written-calls")
    asked = [{"role": "system", "content": 'Answer with {"name": ..., "arguments": ...} to call a tool.'}]
    described = [{"messages": [*asked, *row["messages"]]} for row in rows]
    assert not red(sft(tmp_path / "described", rows=described))


@pytest.mark.parametrize("form", [{}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_arguments_of_calls_are_json_text_as_in_the_api(
    form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(n: int) -> dict[str, Any]:
        return {"name": "add", "arguments": json.dumps({"text": f"trè{n}", "n": n}, **form)}

    asked = [{"role": "user", "content": "Thank you."}, {"role": "assistant", "content": "You are welcome."}]
    rows = [called(n, {"content": "", "tool_calls": [{"type": "function", "function": call(n)}]}) for n in range(40)]
    rows = [{**row, "messages": row["messages"] + asked} for row in rows]
    assert not red(sft(tmp_path / "twin", rows=rows))
    for module in (messages, server_messages):
        monkeypatch.setattr(module, "decoded_arguments", lambda arguments: arguments)
    [found] = [each for each in sft(tmp_path / "faulty", rows=rows) if each.name == "serving"]
    assert "prompts of 40 of 40 rows" in found.line
    assert [str(each).split(": transformers: ")[0] for each in found.details] == ["row 0", "row 1", "row 2"]


OTHERS = [
    {"type": "function", "function": {"name": "mul", "description": "Multiplies.", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (lambda n: {"tools": TOOLS}, set(), ""),
        (lambda n: {"tools": [*OTHERS, *TOOLS] if n % 20 else OTHERS}, set(), ""),  # a model invents some
        (lambda n: {"functions": TOOLS}, {"unused-columns"}, "read it with train_dataset.columns.tools=functions"),
        (
            lambda n: {"tools" if n % 3 else "Functions": TOOLS},
            {"unused-columns", "undeclared-calls"},
            "'Functions' looks like 'tools', is filled in 14 of 40 rows without 'tools', and is not read: rename it",
        ),
        (lambda n: {"tools": TOOLS if n % 3 else OTHERS}, {"undeclared-calls"}, "in 14 of 40 conversations with calls"),
        (lambda n: {"tools": TOOLS if n % 3 else []}, {"undeclared-calls"}, "in 14 of 40 conversations with calls"),
    ],
)
def test_tools_that_the_prompt_does_not_declare_are_found(change, expected, said, tmp_path: Path) -> None:
    calls = [{"type": "function", "function": CALL}]
    rows = [called(n, {"content": "", "tool_calls": calls}) for n in range(40)]
    found = sft(tmp_path, rows=[{"messages": row["messages"], **change(n)} for n, row in enumerate(rows)])
    assert red(found) == expected
    assert any(said in each.line for each in found)


def test_tools_that_no_prompt_declares_are_asked_about(tmp_path: Path) -> None:
    found = sft(tmp_path)
    assert not red(found)
    [asked] = [each for each in found if each.name == "undeclared-calls"]
    assert asked.verdict == "not checked"
    assert "in 40 of 40 conversations" in asked.line


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        (lambda n: "answer", "green", ""),
        (
            lambda n: "anwser",
            "not checked",
            "columns.prompt=question train_dataset.columns.solutions=anwser. Or does the",
        ),
        (lambda n: "Answer", "not checked", "train_dataset.columns.solutions=Answer"),
        (lambda n: "Answer" if n % 3 else "answer", "red", "is filled in 26 of 40 rows without 'solutions'"),
    ],
)
def test_a_column_that_looks_like_the_answer_is_named_with_its_setting(name, verdict, said, tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], name(n): row["solutions"]} for n, row in enumerate(QUESTIONS)]
    found = gspo(tmp_path, f"train_dataset.path={data_file(tmp_path / 'other.jsonl', rows)}")
    [named] = [each for each in found if each.name == "unused-columns"]
    assert named.verdict == verdict
    assert said in named.line


@pytest.mark.parametrize("end", ["So it is #### {}", "So it is \\boxed{{{}}}.", "So it is {}."])
def test_answers_unlike_the_worked_text_of_their_row_are_found(end: str, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"What is {n} plus {n}?",
            "solutions": f"{2 * n}",
            "solution": f"We add {n} and {n}. {end.format(f'{2 * n:,}')}",
        }
        for n in range(480, 600)
    ]

    def checked(name: str, given: list[dict[str, Any]]) -> list[Any]:
        return gspo(tmp_path / name, f"train_dataset.path={data_file(tmp_path / f'{name}.jsonl', given)}")

    twin = checked("twin", rows)
    assert not red(twin)
    assert "column 'solution'" in line_of(twin, "answer-columns")
    cut = [{**row, "solutions": row["solutions"][:1]} if n % 20 == 19 else row for n, row in enumerate(rows)]
    found = checked("faulty", cut)
    assert red(found) == {"answer-columns"}
    assert "in 6 of 120 rows" in line_of(found, "answer-columns")
    of_model = [{**row, "solutions": row["solutions"][:1]} if n % 3 == 0 else row for n, row in enumerate(rows)]
    assert "answer-columns" not in red(checked("model", of_model))
