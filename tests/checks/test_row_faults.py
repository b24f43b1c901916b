"""Faults of rows whose columns, turns or texts do not belong where they are: each is found by its name."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from areno.checks.data import row_order, turns
from areno.checks.data.belonging import _blocks, _match
from tests.helpers import checked
from tests.helpers.checked import data_file, findings, red
from tests.helpers.checked_rows import PAIRS, TALKS, chat_model, dpo, sentences, sft

ANSWERED = [
    {"prompt": f"What is {n} plus {n}?", "response": f"It is {2 * n}.\n\nI am sure of it."} for n in range(100, 140)
]


def line_of(found: list[Any], name: str) -> str:
    return next(each.line for each in found if each.name == name)


def test_a_column_that_goes_into_no_prompt_is_found(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add both.", "input": f"{n} and {n}" * (n % 3 == 0), "output": f"It is {2 * n}."}
        for n in range(100, 140)
    ]
    twin = sft(tmp_path / "twin", rows=[{**row, "source": "arithmetic"} for row in rows])
    assert not red(twin)
    assert "in no message are 'source' (40 rows)" in line_of(twin, "unused-columns")
    columns = [f"train_dataset.columns.{name}" for name in ("prompt=instruction", "response=output")]
    found = sft(tmp_path / "faulty", *columns, rows=rows)
    assert red(found) == {"unused-columns"}
    assert "'input' is filled in 13 of 40 rows" in line_of(found, "unused-columns")
    forms = next(each for each in found if each.name == "row-forms")
    assert "input: '102 and 102'" in "\n".join(map(str, forms.details))


def test_reasoning_that_is_not_trained_is_found(tmp_path: Path) -> None:
    rows = [{**row, "rationale": f"We add {n} twice."} for n, row in enumerate(ANSWERED)]
    assert red(sft(tmp_path, rows=rows)) == {"unused-columns"}


@pytest.mark.parametrize(
    "mark", [{"is_correct": False}, {"split": "test"}, {"label": False}, {"exclude": 1}, {"verified": "no"}]
)
def test_rows_that_are_marked_as_none_for_training_are_found(mark: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**row, **mark} if n % 4 == 0 else row for n, row in enumerate(ANSWERED)]
    found = sft(tmp_path, rows=rows)
    assert red(found) == {"row-flags"}
    assert "10 of 40 training rows" in line_of(found, "row-flags")


def test_messages_that_say_that_they_are_not_trained_are_found(tmp_path: Path) -> None:
    rows = json.loads(json.dumps(TALKS))
    for row in rows:
        row["messages"][1]["train"] = False
    assert red(sft(tmp_path, rows=rows)) == {"row-flags"}


def test_swapped_questions_and_answers_are_found(tmp_path: Path) -> None:
    swapped = [{"prompt": row["response"], "response": row["prompt"]} for row in ANSWERED]
    assert red(sft(tmp_path, rows=swapped)) == {"swapped-columns"}


def with_roles(*roles: str) -> list[dict[str, Any]]:
    texts = [["What is {0} plus {0}?", '{{"name": "add", "arguments": {0}}}', '{{"sum": {1}}}', "It is {1}."]] * 40
    return [
        {"messages": [{"role": role, "content": text.format(n, 2 * n)} for role, text in zip(roles, row, strict=True)]}
        for n, row in enumerate(texts, 100)
    ]


def test_results_of_tools_in_the_words_of_the_assistant_are_found(tmp_path: Path) -> None:
    assert not red(sft(tmp_path / "twin", rows=with_roles("user", "assistant", "tool", "assistant")))
    found = sft(tmp_path / "faulty", rows=with_roles("user", "assistant", "assistant", "assistant"))
    assert red(found) == {"turn-order"}
    lines = [each.line for each in found if each.name == "turn-order"]
    assert "result of a tool" in lines[0]
    assert "directly on a message of the assistant" in lines[1]


def test_swapped_roles_are_found(tmp_path: Path) -> None:
    rows = with_roles("assistant", "user", "assistant", "user")
    for row in rows:
        row["messages"].insert(0, {"role": "system", "content": "Be brief."})
    found = sft(tmp_path, rows=rows)
    assert "the roles seem to be swapped" in line_of(found, "turn-order")


WORDS = [f"{one}{two}" for one in ("kal", "mor", "ten", "bru", "sil", "vog") for two in ("ina", "ota", "umi", "ere")]
STORIES = [
    {
        "prompt": f"What do {one}{number} and {two}{number} trade with {number}?",
        "response": f"They trade {two}{number} for {one}{number}, and {number} waits.\n\nThat is it.",
    }
    for number, (one, two) in enumerate([(one, two) for one in WORDS for two in WORDS if one < two][::2], 1000)
]


def moved(rows: list[dict[str, Any]], first: int, by: int, field: str = "response") -> list[dict[str, Any]]:
    later = [row[field] for row in rows[first:]]
    return rows[:first] + [
        {**row, field: text} for row, text in zip(rows[first:], later[by:] + later[:by], strict=True)
    ]


def test_answers_of_other_rows_are_found(tmp_path: Path) -> None:
    assert not red(sft(tmp_path / "twin", rows=STORIES))
    found = sft(tmp_path / "shifted", rows=moved(STORIES, 60, 1))
    assert red(found) == {"own-answers"}
    assert "between rows 61 and 137" in line_of(found, "own-answers")
    assert "1 row before them" in line_of(found, "own-answers")
    assert red(sft(tmp_path / "mixed", rows=moved(STORIES, 0, 61))) == {"own-answers"}


def test_rejected_answers_of_other_rows_are_found(tmp_path: Path) -> None:
    told = [[row["response"], row["response"].replace("They", "Both")] for row in STORIES]
    told = [texts[:: 1 if n % 2 else -1] for n, texts in enumerate(told)]
    pairs = [
        {"prompt": row["prompt"], "chosen": good, "rejected": bad}
        for row, (good, bad) in zip(STORIES, told, strict=True)
    ]
    assert not red(dpo(tmp_path / "twin", pairs))
    found = dpo(tmp_path / "faulty", moved(pairs, 60, 1, "rejected"))
    assert red(found) == {"own-answers"}
    assert "fit the rejected answer 1 row before" in line_of(found, "own-answers")


def test_answers_to_the_same_question_are_not_those_of_other_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": row["prompt"], "response": text, "label": label}
        for row in STORIES
        for text, label in (
            (f"{row['prompt']} {row['response']}", True),
            (row["response"].split("for")[0] + "for nothing of that kind.", False),
        )
    ]
    for name, given in (("twin", rows), ("faulty", moved(rows, 120, 2))):
        folder = tmp_path / name
        folder.mkdir()
        paths = (f"actor.path={chat_model(folder)}", f"train_dataset.path={data_file(folder / 'rows.jsonl', given)}")
        found = findings("kto labels", *paths, "valid_dataset=null")
        assert ("own-answers" in red(found)) == (name == "faulty")
    assert "2 rows before them" in line_of(found, "own-answers")


def test_blocks_of_a_large_file_hold_rows_beside_each_other() -> None:
    assert _blocks(7, 10) == list(range(7))
    indices = _blocks(100_000, 3000)
    assert len(indices) == 3000
    assert indices[0] == 0
    assert indices[-1] == 99_999
    texts = [" ".join(f"{char}{index}" for char in "abcde") for index in indices]
    assert _match(indices, texts, texts).own == 3000
    assert len(_match(indices, texts, [*texts[1:], texts[0]]).foreign) == 3000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: json.dumps(text)[1:-1], "a backslash and an n"),
        (lambda text: html.escape(f'"{text}"'), "HTML entities"),
        (lambda text: f"{text} Voilà, café.".encode().decode("cp1252", "replace"), "wrong encoding"),
        (lambda text: f"<p>{text}</p>", "HTML tags"),
        (lambda text: f'"{text}"', "are in quotes"),
    ],
)
def test_texts_that_were_not_decoded_are_found(change: Any, said: str, tmp_path: Path) -> None:
    rows = [{**row, "response": change(row["response"])} for row in ANSWERED]
    found = sft(tmp_path, rows=rows)
    assert red(found) == {"encoded-texts"}
    assert said in line_of(found, "encoded-texts")


def test_latex_and_accents_are_no_escapes(tmp_path: Path) -> None:
    rows = [
        {**row, "response": f"$2 \\neq {n}$, voilà: it\u2019s \u201c{n}\u201d \u2013 café."}
        for n, row in enumerate(ANSWERED)
    ]
    assert not red(sft(tmp_path, rows=rows))


def test_escaped_chosen_answers_are_found(tmp_path: Path) -> None:
    pairs = [{**row, "chosen": f"{row['chosen']}\\n\\nSo.", "rejected": f"{row['rejected']}\n\nSo."} for row in PAIRS]
    found = dpo(tmp_path, pairs)
    assert "40 of 40 chosen answers have a backslash" in line_of(found, "encoded-texts")
    assert {"encoded-texts"} <= red(found) <= {"encoded-texts", "pair-marks"}


@pytest.mark.parametrize(
    ("field", "form", "said"),
    [
        ("prompt", "Question: {{question}} {0}", "the name of a field"),
        ("prompt", "{0}\nnan", "None or nan"),
        ("response", "", "are empty"),
        ("response", "None", "None or nan"),
        ("prompt", "[{{'role': 'user', 'content': '{0}'}}]", "as Python prints it"),
        ("response", "Assistant: {0}", "the name of the speaker"),
        ("response", "{0}\nUser: And now?", "next turn of a user"),
        ("response", "<think>\nI add. {0}", "never close it"),
    ],
)
def test_texts_in_which_something_is_missing_are_found(field: str, form: str, said: str, tmp_path: Path) -> None:
    rows = [{**row, field: form.format(row[field])} if n % 2 else row for n, row in enumerate(ANSWERED)]
    found = sft(tmp_path, rows=rows)
    assert "filled-texts" in red(found)
    assert said in line_of(found, "filled-texts")


def test_answers_that_a_number_of_tokens_has_cut_are_found(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Tell me of {n}.", "response": " ".join([f"word{n}"] * (10 + n % 40)) + "."} for n in range(400)
    ]
    assert not red(sft(tmp_path / "twin", rows=rows))
    cut = [
        {**row, "response": " ".join(row["response"].split()[:31]) + "x" * (n % 7)} if n % 40 > 20 else row
        for n, row in enumerate(rows)
    ]
    found = sft(tmp_path / "faulty", rows=cut)
    assert red(found) == {"cut-texts"}
    assert "end within a sentence" in line_of(found, "cut-texts")


def test_solutions_that_some_rows_lack_are_found(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} plus {n}?", "solutions": str(2 * n) if n % 4 else ""} for n in range(100, 140)]
    path = data_file(tmp_path / "rows.jsonl", rows)
    settings = (f"actor.path={chat_model(tmp_path)}", f"train_dataset.path={path}", "reward.fn=math")
    found = findings("gspo prompts", *settings, "valid_dataset=null")
    assert red(found) == {"filled-texts"}
    assert "10 of 40 solutions are empty" in line_of(found, "filled-texts")


SYSTEM = {"role": "system", "content": "You are a careful helper."}
TURNS = [
    [
        {"role": "user", "content": f"{n}: {sentences(n)}"},
        {"role": "assistant", "content": sentences(n + 500)},
        {"role": "user", "content": f"And {n}?"},
        {"role": "assistant", "content": sentences(n + 900)},
    ]
    for n in range(60)
]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda talk, n: [SYSTEM, *talk], ""),
        (lambda talk, n: [SYSTEM, *talk] if n % 2 else talk, ""),  # two kinds of rows
        (lambda talk, n: [SYSTEM, *talk] if n % 9 else talk, "in 7 of 60 rows, the system message is missing"),
        (lambda talk, n: [*talk[:3], SYSTEM, talk[3]], "in 60 of 60 rows, a system message is after"),
        (lambda talk, n: [talk[0], *talk] if n % 6 == 0 else talk, "a message of a user is there twice"),
        (lambda talk, n: [talk[2], *talk] if n % 6 == 0 else talk, ""),
    ],
)
def test_messages_in_another_order_are_found(change, line, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [turns.turn_order]})
    [found] = sft(tmp_path, rows=[{"messages": change(talk, n)} for n, talk in enumerate(TURNS)])
    assert found.verdict == ("red" if line else "green"), found
    assert line in found.line


IS_AGAIN = "(message.role == 'user' and loop.{0}item is defined and loop.{0}item.role == 'user')"


def test_users_who_speak_twice_are_found_if_the_template_joins_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [turns.turn_order]})
    rows = [{"messages": [talk[2], *talk] if n % 6 == 0 else talk} for n, talk in enumerate(TURNS)]
    joins = (
        (
            "'<|im_start|>' + message.role + '\\n'",
            f"('\\n\\n' if {IS_AGAIN.format('prev')} else '<|im_start|>' + message.role + '\\n')",
        ),
        (
            "{{- '<|im_end|>\\n' -}}\n{%- endfor",
            f"{{{{- '' if {IS_AGAIN.format('next')} else '<|im_end|>\\n' -}}}}\n{{%- endfor",
        ),
    )
    [found] = sft(tmp_path, rows=rows, model=chat_model(tmp_path, *joins))
    assert found.verdict == "red"
    assert "two messages of a user follow each other, which the chat template joins" in found.line


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_source_without_a_system_message_is_asked_about(is_marked, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [turns.turn_order]})
    own = [n % 9 == 0 if is_marked else n < 7 for n in range(len(TURNS))]
    rows = [
        {"messages": talk if alone else [SYSTEM, *talk], **({"source": "ab"[alone]} if is_marked else {})}
        for talk, alone in zip(TURNS, own, strict=True)
    ]
    [found] = sft(tmp_path, rows=rows)
    assert found.verdict == "not checked"
    assert "in 7 of 60 rows, the system message is missing" in found.line


@pytest.mark.parametrize(("key", "line"), [(lambda row: len(row["response"]), "sorted by the length"), (None, "")])
def test_rows_that_are_sorted_and_not_shuffled_are_found(key, line, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [row_order.rows_of_a_step]})
    rows = [{"prompt": f"Tell me about {n}.", "response": sentences(n)} for n in range(200)]
    found = sft(tmp_path, "train_dataset.shuffle=false", rows=sorted(rows, key=key) if key else rows)
    assert [each.verdict for each in found] == (["not checked"] if line else [])  # a curriculum may be meant
    assert all(line in each.line for each in found)
