"""`areno check -- COMMAND`: its command line, its output and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.checks import all_checks
from areno.checks.inputs.findings import Finding, NotChecked, green, red, run_checks
from areno.cli.__main__ import main

QUICKSTART = ["check", "--only", "data", "--", "python", "-m", "areno.recipes.gspo", "--config-name=quickstart"]


def test_the_data_of_the_quickstart_is_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, record = tmp_path / "page.html", tmp_path / "found.json"
    assert main([*QUICKSTART[:1], "--html", str(page), "--json", str(record), *QUICKSTART[1:]]) == 0
    out = capsys.readouterr().out
    assert "green       row-forms" in out
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["command"] == "python -m areno.recipes.gspo --config-name=quickstart"
    assert {each["verdict"] for each in found["findings"]} <= {"green", "not checked"}
    assert "train_dataset: 4,100 rows in 1 form" in page.read_text(encoding="utf-8")


def test_the_command_may_be_one_of_areno_train(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["areno", "train", "--algo", "grpo", "--config-name", "quickstart"]
    assert main([*QUICKSTART[:4], *command]) == 0
    assert main([*QUICKSTART[:4], *command, "--batch-size", "0"]) == 2
    assert "--batch-size: is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check --json a.json", "--json: is for a run; add -- COMMAND"),
        ("check --device cpu -- gspo", "--device: is not for the check of a run; leave it out"),
        ("check --only date -- gspo", "--only: there is no 'date'; did you mean data?; there are data, reward"),
        ("check -- gspo --config-name=quickstart gconfig.n_samples=0", "gconfig.n_samples: is 0"),
        ("check -- areno train --algo gspo", "--dataset-path"),
    ],
)
def test_errors_are_in_the_words_of_the_caller(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_only_red_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for check, code in ((lambda subject: [green("a", "")], 0), (lambda subject: [red("b", "", ["why"])], 1)):
        monkeypatch.setattr(all_checks, "CHECKS", {"data": [check]})
        assert main(QUICKSTART) == code
    out = capsys.readouterr().out
    assert "    why" in out
    assert [line for line in out.splitlines() if line][-2].split() == ["red", "b"]


def test_a_check_that_cannot_check_says_why() -> None:
    def rows_are_read(subject: object) -> list[Finding]:
        raise NotChecked("there are none")

    def it_breaks(subject: object) -> list[Finding]:
        raise ZeroDivisionError("by zero")

    found = list(run_checks({"data": [rows_are_read, it_breaks]}, None))  # type: ignore[arg-type]
    assert [(each.name, each.verdict) for each in found] == [
        ("rows-are-read", "not checked"),
        ("it-breaks", "not checked"),
    ]
    assert found[0].line == "there are none"
    assert found[1].line == "the check itself failed: ZeroDivisionError: by zero"


def test_a_red_line_is_printed_once() -> None:
    twice = [red("a", "same"), red("a", "same"), red("a", "other")]
    assert [each.line for each in run_checks({"data": [lambda subject: twice]}, None)] == ["same", "other"]  # type: ignore[arg-type]
