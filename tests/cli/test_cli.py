"""The command `areno`: what it offers, how fast it says so, and the commands that look at runs and the installation."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areno.cli import check, env, reference
from areno.cli.__main__ import COMMANDS, main
from tests.helpers.made_up_runs import make_run

ROOT = Path(__file__).parents[2]
NAMES = [name for commands in COMMANDS.values() for name in commands]


def test_help_lists_every_command_in_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    for name in NAMES:
        assert f"\n  {name:<12}" in told
    assert len(told.splitlines()) <= 40
    assert max(map(len, told.splitlines())) <= 120


def test_every_module_of_a_command_is_listed() -> None:
    modules = {path.stem for path in (ROOT / "areno/cli").glob("*.py")}
    of_others = {"__init__", "__main__", "check_run", "given_command", "league", "reference", "train_flags"}
    assert modules - of_others == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_a_command_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    told = capsys.readouterr().out
    assert told.startswith(f"usage: areno {name} ")
    parser = argparse.ArgumentParser()
    importlib.import_module(f"areno.cli.{name}").add_arguments(parser)
    assert all(action.help for action in parser._actions if name != "bench"), name


@pytest.mark.slow
def test_help_of_no_command_loads_what_is_slow() -> None:
    """In one process: importing the module of a command and making its parser takes no torch and no Hydra."""
    script = f"""
import argparse, importlib, sys
from areno.cli.__main__ import main
for name in {NAMES}:
    importlib.import_module(f"areno.cli.{{name}}").add_arguments(argparse.ArgumentParser())
slow = {{"torch", "transformers", "datasets", "hydra", "plotly", "aiohttp"}} & set(sys.modules)
sys.exit(", ".join(slow) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "start",
    [
        "from areno.cli.__main__ import main; main(['train', '--config-name', 'quickstart'])",
        "from areno.cli.__main__ import main; main(['replay', 'run', '--step', '1'])",
        "from areno.cli.__main__ import main; main(['serve', 'folder'])",
        "from areno.cli.__main__ import main; main(['env'])",
        "sys.argv[1:] = []; runpy.run_module('areno.recipes.gspo', run_name='__main__')",
    ],
)
def test_the_first_sign_of_life_comes_before_what_is_slow(start: str) -> None:
    """What a terminal shows first is written when nothing slow is imported yet."""
    script = f"""
import os, runpy, sys
class Terminal:
    def isatty(self): return True
    def flush(self): pass
    def write(self, text):
        slow = {{"torch", "transformers", "datasets", "hydra", "aiohttp"}} & set(sys.modules)
        sys.__stdout__.write(f"{{', '.join(slow)}} before {{text!r}}" if slow else "early")
        sys.__stdout__.flush()
        os._exit(0)
sys.stdout = sys.stderr = Terminal()
{start}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "early", done.stderr


def test_an_unknown_command_is_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evalaute"])
    assert "there is no command 'evalaute'; did you mean evaluate?" in capsys.readouterr().err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of an experiment, and a sweep of two."""
    for name, seed in {"a": 1, "b": 2}.items():
        make_run(tmp_path / "runs" / "adding", name, seed, 3)
        make_run(tmp_path / "runs" / "adding" / "sweep", str(seed - 1), seed, 2)
    (tmp_path / "runs/adding/sweep/multirun.yaml").write_text("{}")
    return tmp_path / "runs"


def test_runs_has_a_line_for_each(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs)]) == 0
    told = capsys.readouterr().out
    lines = [line for line in told.splitlines() if "adding/" in line]
    assert [name for line in lines for name in line.split() if "adding/" in name] == [
        "adding/a",
        "adding/b",
        "adding/sweep/0",
        "adding/sweep/1",
    ]
    assert "reward 0.3 at step 3" in lines[0]


def test_compare_takes_a_sweep_for_its_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "adding/a"), str(runs / "adding/sweep")]) == 0
    told = capsys.readouterr().out
    assert "seed" in told
    assert "a" in told
    assert main(["compare", str(runs / "adding/a")]) == 2
    assert "is one run" in capsys.readouterr().err


def test_report_writes_the_page_and_says_where(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly", reason="needs the report extra")
    assert main(["report", str(runs / "adding/sweep"), "-o", str(tmp_path / "page.html")]) == 0
    assert "page.html: 2 runs, " in capsys.readouterr().out
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs / "adding/a"), str(runs / "adding/b")]) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", ["runs", "compare", "report"])
def test_what_is_no_run_is_told(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(tmp_path / "none")] * (2 if command == "compare" else 1)
    assert main([command, *folders, *([str(tmp_path)] if command == "compare" else [])]) == 1
    assert "none does not exist" in capsys.readouterr().err


def test_recipes_lists_what_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    told = capsys.readouterr().out
    for line in ("  ppo +Proximal", r"  gsm8k +\[grpo, gspo, ppo, online_dpo\] GSM8K", "  dapo +DAPO"):
        assert re.search(f"^{line}", told, re.M)


# -- this installation


def test_env_as_json_has_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"].startswith("2.")
    assert found["devices"] == []  # the tests hide them
    assert found["kernels"]["attention"] == "torch scaled_dot_product_attention"
    assert main(["env"]) == 0
    told = capsys.readouterr().out
    for name, value in found["versions"].items():
        assert f"{name:<16}{value or '-'}" in told


def test_extras_are_those_whose_packages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        def get_all(self, name: str) -> list[str]:
            return ["one", "two"]

    needed = ["pytest>=1; extra == 'one'", "pytest>=9999; extra == 'two'", "no-such-thing; extra == 'two'", "torch"]
    monkeypatch.setattr(env.metadata, "metadata", lambda name: Metadata())
    monkeypatch.setattr(env.metadata, "requires", lambda name: needed)
    assert env.missing_requirements() == {"one": [], "two": ["pytest>=9999", "no-such-thing"]}


@pytest.mark.slow
def test_check_goes_on_after_what_fails_and_its_exit_code_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The good case is in docs/reference/cli.md, which a test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(check.AGREEMENT, "float32", -1.0)
    assert main(["check", "--device", "cuda"]) == 1
    told = capsys.readouterr().out
    assert "FAIL  device             torch 2." in told
    assert "sees no CUDA device" in told
    assert "ok    reward processes" in told
    assert re.search(r"^(ok|-) +box +(limits files by|no program can run in one)", told, re.M)
    assert "FAIL  model" in told
    assert told.splitlines()[-1] == "device, kernels, model: see above"
    assert main(["check", "--device", "cpu"]) == 1
    told = capsys.readouterr().out
    assert "FAIL  optimizer step     log-probabilities of rollout and training differ by" in told
    assert "ok    checkpoint" in told
    assert not list(tmp_path.iterdir())


def index_of(folder: Path, *files: str) -> None:
    """Write an index that names these files, in place of the one file of weights."""
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    weight_map = {f"tensor.{number}": file for number, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def cut_off(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def other_config(folder: Path, **changes: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "nothing": (
        lambda folder: None,
        [
            "ok    model  *qwen3, 3 layers",
            "ok    weights  *35 tensors in 1 file, 1.2 MiB",
            "ok    tokenizer  *16 tokens",
        ],
    ),
    "no weights, no tokenizer": (
        lambda folder: remove(folder, "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        ["ok    model", "FAIL  weights  .*has no weights", "FAIL  tokenizer  .*has no tokenizer"],
    ),
    "cut off": (
        lambda folder: [cut_off(folder / "model.safetensors", 300_000), cut_off(folder / "tokenizer.json", 500)],
        [
            "ok",
            "FAIL  weights  .*model.safetensors is truncated",
            "FAIL  tokenizer  *tokenizer_path: no tokenizer can be",
        ],
    ),
    "absent files": (
        lambda folder: [index_of(folder, "a.safetensors", "weights.safetensors", "b.safetensors")],
        [
            "ok",
            "FAIL  weights  .*a.safetensors is missing",
            "FAIL  weights  .*b.safetensors is missing",
            "ok    tokenizer",
        ],
    ),
    "files elsewhere": (
        lambda folder: index_of(folder, "weights.safetensors", "../x.safetensors", "/x.safetensors", "config.json"),
        [
            "ok",
            r"FAIL  weights  .*weight_map names '../x.safetensors', '/x.safetensors', 'config.json'; expected pl",
            "ok",
        ],
    ),
    "other shape": (
        lambda folder: other_config(folder, intermediate_size=128),
        [
            "ok",
            *[r"FAIL  weights  .* has shape \(.*256.*\), expected"] * 5,
            "FAIL  weights  .*and 4 more tensors",
            "ok",
        ],
    ),
    "other tensors": (
        lambda folder: other_config(folder, tie_word_embeddings=False, attention_bias=True),
        ["ok", r"FAIL  weights  .*lack .*q_proj.bias", "ok"],
    ),
    "no config": (
        lambda folder: [remove(folder, "config.json"), cut_off(folder / "model.safetensors", 9)],
        ["FAIL  model  .*has no config.json", "FAIL  weights  .*truncated", "ok    tokenizer"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_says_all_that_a_model_folder_lacks(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(ROOT / "examples/quickstart/model", tmp_path / "model"))
    break_it, expected = DAMAGES[damage]
    break_it(folder)
    assert main(["check", str(folder)]) == (damage != "nothing")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.match(pattern, line), line


# -- completion


def completions(line: str, answer: Path) -> set[str]:
    """What argcomplete answers a shell for a line. The shell gives it a file to answer into."""
    pytest.importorskip("argcomplete", reason="needs the completion extra")
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_IFS": "\n",
    }
    subprocess.run([sys.executable, "-m", "areno.cli"], env=environment, timeout=60)
    return {word.strip() for word in answer.read_text(encoding="utf-8").split("\n")}


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("areno re", {"report", "recipes"}),
        ("areno train --critic-", {"--critic-ckpt", "--critic-lr", "--critic-warmup-steps"}),
        ("areno train --config-name quick", {"quickstart", "quickstart_ppo"}),
        ("areno train --algo ppo critic.optimizer.l", {"critic.optimizer.lr=", "critic.optimizer.lr_decay_steps="}),
        ("areno bench rol", {"rollout"}),
    ],
)
def test_tab_completes(line: str, some: set[str], tmp_path: Path) -> None:
    found = completions(line, tmp_path / "answer")
    assert some <= found, found


def test_the_shell_code_calls_us(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete", reason="needs the completion extra")
    assert main(["completion", "bash"]) == 0
    assert "areno" in capsys.readouterr().out


def test_generated_pages_are_current() -> None:
    for page, text in reference.generated_pages(ROOT / "docs").items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name} is not up to date; run: make reference"
