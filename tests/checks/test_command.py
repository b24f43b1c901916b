"""`areno check -- COMMAND`: its command line, its output and its exit code."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from areno.checks import all_checks
from areno.checks.inputs import findings
from areno.checks.inputs.findings import Finding, NotChecked, green, red, run_checks
from areno.checks.page import red_lines
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

    found = list(run_checks({"data": [rows_are_read, it_breaks]}, _FakeSubject()))  # type: ignore[arg-type]
    assert [(each.name, each.verdict) for each in found] == [
        ("rows-are-read", "not checked"),
        ("it-breaks", "not checked"),
    ]
    assert found[0].line == "there are none"
    assert found[1].line == "the check itself failed: ZeroDivisionError: by zero"


def test_a_red_line_is_printed_once() -> None:
    twice = [red("a", "same"), red("a", "same"), red("a", "other")]
    found = run_checks({"data": [lambda subject: twice]}, _FakeSubject())  # type: ignore[arg-type]
    assert [each.line for each in found] == ["same", "other"]


class _FakeSubject:
    doing = ""

    def __init__(self) -> None:
        self.announced: list[str] = []

    def announce(self, text: str) -> None:
        self.announced.append(text)


def test_a_check_that_takes_long_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _FakeSubject()

    def slow_check(given: _FakeSubject) -> list[Finding]:
        given.doing = "4 groups of samples"
        until = time.monotonic() + 10
        while not given.announced and time.monotonic() < until:
            time.sleep(0.01)
        return []

    monkeypatch.setattr(findings, "_WAIT_S", 0.05)
    assert not list(run_checks({"data": [slow_check]}, subject))  # type: ignore[arg-type, list-item]
    assert subject.announced[0].endswith("s for slow-check (4 groups of samples)")


def test_red_lines_name_the_cause_first() -> None:
    names = ("off-policy-loss", "shared-prefixes", "prompt-end", "teacher-logprobs")
    lines = list(red_lines([red(name, "is wrong") for name in names]))
    assert [line.split()[1] for line in lines] == ["prompt-end", "teacher-logprobs", *names[:2]]
    assert [line.endswith("is wrong (may follow from teacher-logprobs)") for line in lines] == [
        False,
        False,
        True,
        True,
    ]
    assert [line.split()[1] for line in red_lines([red("shared-prefixes", "a"), red("a", "b")])] == [
        "a",
        "shared-prefixes",
    ]
    passes = [red(name, "is wrong") for name in ("rollout-logprobs", "training-logprobs")]
    assert not any("may follow" in line for line in red_lines(passes))  # neither is computed from the other
