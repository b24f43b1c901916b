"""Runs that are damaged, or that may not be read: each command says it in one line, and exits with 1 or 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from areno.cli.__main__ import main
from areno.errors import ArenoError, as_file_error
from areno.tracking.reader import RunReader
from tests.helpers.command_runs import fails, run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("trial_name=t") == 0
    return folder / "out/quickstart/t"


@pytest.fixture
def broken(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path / "t", symlinks=True)
    return Path("t")


def told(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """What a command says that fails: one line."""
    assert main(list(words)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("logs/metrics.jsonl", replaced_by_folder, "cannot be read: Is a directory"),
        ("logs/metrics.jsonl", lambda path: path.write_text("{no\n"), "line 1: is not JSON"),
        ("config.yaml", lambda path: path.write_text("a: [1,\nb"), "cannot be read: line 2: expected ',' or ']'"),
        ("config.yaml", lambda path: path.write_bytes(b"\xff\xfe\0"), "cannot be read: 'utf-8' codec"),
        ("config.yaml", lambda path: path.write_text(BOMB), "each alias counts as a full copy"),
        ("config.yaml", lambda path: path.write_text("- a\n"), "it holds a list, where a mapping is expected"),
        (
            "config.yaml",
            lambda path: path.write_text("a: &a [*a]\n"),
            "the alias *a refers to a value that contains",
        ),
        ("overrides.yaml", lambda path: path.write_text("a: b\n"), "it holds a mapping, where a list of texts"),
        ("versions.json", lambda path: path.write_text("{{"), "cannot be read: "),
        ("versions.json", lambda path: path.write_text("[1]"), "it holds a list, where a mapping is expected"),
        ("versions.json", lambda path: path.write_text("[" * 10**5), "cannot be read: it is nested too deeply"),
        ("logs/metrics.jsonl", replaced_by_pipe, "cannot be read: it is not a regular file"),
        ("rollouts/000002.jsonl", replaced_by_folder, "cannot be read: Is a directory"),
    ],
)
def test_a_damaged_file_is_named(broken: Path, name: str, damage: Callable[[Path], object], message: str, capsys):
    pytest.importorskip("plotly", reason="needs the report extra")
    damage(broken / name)
    said = told(capsys, 1, "report", "t", "-o", "page.html")
    assert said.startswith(f"t/{name}")
    assert message in said
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("logs/metrics.jsonl", (["compare", "other", "t"], ["report", "t"])),
        ("rollouts/000002.jsonl", (["replay", "t", "--step", "2", "--sample", "0"], ["report", "t"])),
        (
            "config.yaml",
            (["replay", "t", "--step", "2", "--sample", "0"], ["evaluate", "t"], ["compare", "other", "t"]),
        ),
    ],
)
def test_a_file_that_may_not_be_read(broken: Path, name: str, commands: list[list[str]], capsys, monkeypatch):
    pytest.importorskip("plotly", reason="needs the report extra")
    shutil.copytree(broken, "other", symlinks=True)
    opened, refused = Path.open, (broken / name).absolute()

    def refuse(path: Path, *args, **options):
        if path.absolute() == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)  # read_bytes and read_text call it
    for words in commands:
        assert f"{name} cannot be read: Permission denied" in told(capsys, 1, *words)


def test_one_damaged_run_does_not_hide_the_others(broken: Path, capsys):
    shutil.copytree(broken, "other", symlinks=True)
    replaced_by_folder(broken / "logs/metrics.jsonl")
    assert main(["runs", "."]) == 0
    listed = capsys.readouterr().out
    assert "damaged" in listed
    assert "completed" in listed


def test_a_folder_whose_name_is_not_utf_8(broken: Path, capfdbinary):
    """It is shown with its bytes escaped, in tables and pages, and in errors."""
    pytest.importorskip("plotly", reason="needs the report extra")
    name = os.fsdecode(b"r\xff")
    shutil.move(broken, name)
    for words in (["runs", "."], ["report", name, "-o", "page.html"], ["compare", name, name + "/../" + name]):
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a pipe
        with contextlib.redirect_stdout(out):
            assert main(words) == 0, words
            out.flush()
            assert words[0] == "report" or b"r\\udcff" in out.buffer.getvalue(), words  # type: ignore[attr-defined]
    assert "r?" in Path("page.html").read_text(encoding="utf-8")
    assert main(["report", os.fsdecode(b"\xfe")]) == 1


def test_a_folder_that_may_not_be_entered(broken: Path, monkeypatch):
    (broken / "config.yaml").unlink()
    (broken / "logs/metrics.jsonl").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != broken)
    with pytest.raises(ArenoError, match=r"^t cannot be read: Permission denied$"):
        RunReader(broken)


def test_a_run_of_another_version_is_told(broken: Path, capsys):
    (broken / "versions.json").write_text(json.dumps({"areno": "9.0"}))
    (broken / "config.yaml").write_text((broken / "config.yaml").read_text() + "brand_new: 3\n")
    for words in (["replay", "t", "--step", "2", "--sample", "0"], ["evaluate", "t", "--data", "x.jsonl"]):
        assert main(words) == 2
        assert "t is a run of areno 9.0, and this is areno " in capsys.readouterr().err
    assert run("--resume", "t") == 2
    assert "t is a run of areno 9.0, and this is areno " in capsys.readouterr().err


def test_a_place_that_cannot_be_used_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for place in (
        "areno.tracking.run_log.RunLog",
        "areno.tracking.run_folder.make_run_folder",
    ):  # in the run, and before it
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *args, **options: Path("folder").write_text("x"))
            fails(capsys, "^error: folder: Is a directory$", 1)
    monkeypatch.setattr("areno.cli.recipes.run", lambda arguments: Path("folder").write_text("x"))
    assert told(capsys, 1, "recipes") == "folder: Is a directory"
    assert as_file_error(ConnectionRefusedError(111, "Connection refused")) is None
    assert as_file_error(FileNotFoundError(2, "No such file", "x")) is None  # may be a fault of ours


def test_a_report_does_not_replace_a_pipe(broken: Path):
    pytest.importorskip("plotly", reason="needs the report extra")
    os.mkfifo("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text(encoding="utf-8")))
    reader.start()
    assert main(["report", "t", "-o", "pipe"]) == 0
    reader.join(60)
    assert read[0].rstrip().endswith("</html>")
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)


def test_steps_without_samples_name_those_with(broken: Path, capsys):
    assert (
        told(capsys, 1, "replay", "t", "--step", "9", "--sample", "0")
        == "t has no samples of step 9; it has those of 1, 2"
    )
    shutil.rmtree(broken / "rollouts")
    assert "it has none of any step (rollout.dump_n_samples)" in told(
        capsys, 1, "replay", "t", "--step", "2", "--sample", "0"
    )
