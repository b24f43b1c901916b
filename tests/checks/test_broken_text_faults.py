"""Faults of texts that were broken on their way, in 1 % of the rows: each is found, and nothing in the clean rows."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from areno.checks.data import broken_texts, columns, references, texts
from tests.helpers import checked
from tests.helpers.checked import data_file, findings
from tests.helpers.checked_rows import chat_model, sentences, sft

ROWS = [
    {"prompt": f"Tell me about {n}.", "response": f"It's {n}:\n{sentences(n)}\nGood \\neq bad."} for n in range(500)
]
CODE = 'Use `print("a\\n")`.\n```\nif a &lt; b: print("x\\ny\\n\\n")\n```'


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: text, ""),
        (lambda text: CODE, ""),
        (lambda text: text.replace("\n", "\\n"), "a backslash and an n in place of line breaks"),
        (lambda text: text.replace("'", "&#39;"), "HTML entities"),
        (lambda text: f"{text} \u00e2\u20ac\u0153na\u00c3\u00afve", "letters of a wrong encoding"),
        (lambda text: text.replace("\n", "\x0b"), "control characters or invisible ones"),
        (lambda text: text.replace(" ", "\u00a0"), "no-break spaces"),
        (lambda text: base64.b64encode(text.encode()).decode(), "no spaces between their words"),
        (lambda text: text.replace(". ", ".").replace("\n", ""), "lines without breaks"),
        (lambda text: f"{text} {text}", "say everything twice"),
        (lambda text: f"<s>{text}", "written for another chat template"),
        (lambda text: f"{text}<pad><pad>", "written for another chat template"),
        (lambda text: f"{text}<|im_end|>", "the text of a token that ends them"),
        (lambda text: text.replace(" ", "").replace("\n", ""), "no spaces between their words"),
        (lambda text: text.replace("\n", " \\n ") + " \\n", "a backslash and an n in place of line breaks"),
        (lambda text: f"{CODE} {text}".replace("\n", "\\n"), "a backslash and an n in place of line breaks"),
        (lambda text: "", "10 of 500 answers are empty"),
        (lambda text: "nan", "None or nan"),
    ],
)
def test_texts_that_were_broken_in_a_few_rows_are_found(
    change: Callable[[str], str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [broken_texts.encoded_texts, broken_texts.filled_texts, texts.template_markers, texts.end_tokens]
    monkeypatch.setattr(checked, "CHECKS", {"data": checks})
    rows = [row | {"response": change(row["response"])} if n % 50 == 7 else row for n, row in enumerate(ROWS)]
    found = [each.line for each in sft(tmp_path, rows=rows) if each.verdict == "red"]
    assert len(found) == bool(line), found
    assert all(line in each for each in found)


@pytest.mark.parametrize(
    ("prompt", "label", "verdict"),
    [
        ("Tell me.\nContext: None", "yes", "red"),
        ("Tell me.\nAllergies: None", "yes", "not checked"),
        ("Tell me.", "nan", "red"),
        ("Tell me.", "None", "red"),  # the others have no capitals
        ("Tell me.", "none", "green"),
    ],
)
def test_lines_and_labels_that_may_be_none_are_asked_about(
    prompt: str, label: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [broken_texts.filled_texts]})
    plain = [{"prompt": f"Tell me.\n{n}", "response": ("yes", "no")[n % 2]} for n in range(160)]
    rows = [{"prompt": f"{prompt}\n{n}", "response": label} for n in range(40)] + plain
    [found] = sft(tmp_path, rows=rows)
    assert found.verdict == verdict, found


WORK = [
    (f"What is {7 * n} plus {n}?", str(8 * n), f"Seven and one are eight, so we take eight.\n#### {8 * n}")
    for n in range(1, 201)
]


def test_worked_solutions_that_are_not_trained_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [columns.unused_columns]})
    for more, is_red in (
        (lambda work: {"proof": work}, True),
        (lambda work: {"parts": work.split("\n")}, True),
        (lambda work: {"source": "https://example.com/a/long/address/of/a/page"}, False),
    ):
        rows = [{"prompt": asked, "response": answer, **more(work)} for asked, answer, work in WORK]
        [found] = sft(tmp_path, rows=rows, model=tmp_path / "model" if (tmp_path / "model").exists() else None)
        assert (found.verdict == "red") == is_red, found
        assert ("works out the short answers" in found.line) == is_red


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (lambda n: WORK[n][1], ""),
        (lambda n: WORK[n - 1][1] if 80 <= n < 130 else WORK[n][1], "that of the text 1 row before it"),
        (lambda n: str(round(int(WORK[n][1]), -1)), "rounded or cut"),
        (lambda n: str(n % 7) if 80 <= n < 130 else WORK[n][1], "all of them are between rows 80 and 129"),
    ],
)
def test_answers_that_disagree_in_many_rows_are_found(
    answer: Callable[[int], str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "CHECKS", {"data": [references.answers_of_texts]})
    rows = [{"prompt": asked, "solutions": answer(n), "work": work} for n, (asked, _, work) in enumerate(WORK)]
    files = [f"actor.path={chat_model(tmp_path)}", f"train_dataset.path={data_file(tmp_path / 'rows.jsonl', rows)}"]
    [found] = findings("gspo prompts", *files, "valid_dataset=null", "reward.fn=math")
    assert found.verdict == ("red" if line else "green"), found
    assert line in found.line
