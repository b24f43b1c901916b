"""What docs/families.md shows is so: its commands, its script, its diff and its table."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from areno.cli.__main__ import main
from areno.models.registry import FAMILIES, MISSING
from tests.helpers.pages import ROOT, blocks

PAGE = ROOT / "docs/families.md"
MODEL = ROOT / "examples/quickstart/model"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    n_shown, said = 0, ""
    for info, text in blocks(PAGE):
        kind, _, file = info.partition(" file=")
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        elif kind == "bash check":
            capsys.readouterr()
            code = main(shlex.split(text)[1:])
            said = capsys.readouterr().out
            assert code == ("FAIL" in said)
        elif kind == "python":
            names: dict[str, Any] = {"__name__": "__main__", "base": str(MODEL)}
            exec(compile(text, str(PAGE), "exec"), names)
            said = capsys.readouterr().out
        elif kind == "text":
            assert text == said
            n_shown += 1
    assert n_shown == 6


def test_the_diff_is_what_the_files_have() -> None:
    [diff] = [text for info, text in blocks(PAGE) if info == "diff"]
    code, n_lines = "", 0
    for line in diff.splitlines():
        if line.startswith("+++ "):
            code = (ROOT / line.removeprefix("+++ ")).read_text(encoding="utf-8")
        else:
            assert f"{line[1:]}\n" in code, line
            n_lines += 1
    assert n_lines > 10


def test_every_family_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} >= FAMILIES.keys()


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 1
    assert f"{tmp_path} has no config.json; expected a Hugging Face model folder (FOLDER)" in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--world-size", "2"]) == 2
    assert "--device and --world-size are not for FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("name", MISSING)
def test_a_known_architecture_says_what_it_would_need(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(f'{{"architectures": ["{name}"]}}')
    assert main(["check", str(config)]) == 1
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    assert f"architectures is {name}, which is not supported: it needs {MISSING[name]}; expected one of" in told
