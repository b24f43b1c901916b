"""What the documents show runs: commands, code blocks, links and error messages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(kind: str) -> list[tuple[str, str]]:
    """(page, command) of every `python -m areno...` line in blocks that begin with ```<kind>."""
    found = []
    for page in PAGES:
        for info, text in blocks(page):
            if info.split(" file=")[0].strip() == kind:
                for line in text.splitlines():
                    at = line.find("python -m areno.")
                    if at >= 0:
                        found.append((page.name, line[at:]))
    return found


def run(command: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command, comments=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        [sys.executable, *words[1:], *more], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(("page", "command"), commands("bash"))
def test_commands_in_the_documents_compose(page: str, command: str, tmp_path: Path) -> None:
    if "--help" in command or "areno.bench" in command or "areno.config.reference" in command:
        done = run(command.split(">")[0], tmp_path, *(["--help"] if "bench" in command else []))
    elif "hydra/sweeper=optuna" in command:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the sweep extra")
        done = run(command, tmp_path, "hydra.sweeper.n_trials=1", "total_train_steps=1", "valid_dataset=null")
    else:
        words = [word for word in shlex.split(command, comments=True) if word != "-m" or "areno" in command]
        sweep = "-m" in words[3:]
        if sweep:  # --cfg shows one run; the first of each list of values stands for all
            words = [re.sub(r"=([^,]*),.*", r"=\1", word) for word in words[:3] + [w for w in words[3:] if w != "-m"]]
        done = run(shlex.join(words), tmp_path, "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_task_of_ones_own_runs_as_the_page_says(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tasks.md"
    for info, text in blocks(page):
        if " file=" in info:
            (tmp_path / info.split(" file=")[1]).write_text(text, encoding="utf-8")
    lines = [command for name, command in commands("bash run") if name == "tasks.md"]
    assert len(lines) == 2
    for line in lines:
        done = run(line, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "step=2/2" in done.stderr
    assert len(list(tmp_path.glob("outputs/letters/*/checkpoints/step-000002/model.safetensors"))) == 2


def test_the_error_shown_is_the_error_printed(tmp_path: Path) -> None:
    [(_, command)] = commands("bash fails")
    shown = next(text for info, text in blocks(ROOT / "docs" / "tasks.md") if info == "text")
    done = run(command, tmp_path)
    assert done.returncode == 2
    assert done.stderr == shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_metric_names_on_the_page_are_those_recorded(tmp_path: Path) -> None:
    """Every scalar of a short run has its row in docs/runs.md."""
    import json

    done = run("python -m areno.recipes.gspo total_train_steps=1 trial_name=t", tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "outputs/quickstart/t/logs/metrics.jsonl").read_text().splitlines()
    recorded = {name for line in lines for name in json.loads(line)} - {"step", "time"}
    page = (ROOT / "docs" / "runs.md").read_text()
    documented = set()
    for cell in re.findall(r"^\| `(\w+/[^`]+)`", page, re.M):
        namespace, names = cell.split("/", 1)
        first, *rest = names.split()
        documented.add(f"{namespace}/{first}")
        for name in rest:
            documented.add(f"{namespace}/{first.rsplit('_', 1)[0]}{name}" if name[0] == "_" else f"{namespace}/{name}")
    assert recorded <= documented, recorded - documented


def test_the_sdk_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, in order; what they show, and every number and key they could return, is what the page says."""
    from areno.api.backend import RuntimeConfig
    from areno.config.fields import settings

    page = ROOT / "docs" / "sdk.md"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    returned: set[str] = set()
    for info, text in blocks(page):
        if info == "python":
            exec(compile(text, str(page), "exec"), names)
            returned |= {*names.get("stats", {}), *names.get("critic_stats", {})}
        elif info == "text":
            assert text == names["message"] + "\n"
    mean_rewards = names["mean_rewards"]
    assert sum(mean_rewards[-8:]) > sum(mean_rewards[:8]) + 1.2, mean_rewards
    assert (tmp_path / "checkpoints" / "addition" / "model.safetensors").exists()
    text = page.read_text(encoding="utf-8")
    keys = {key for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.M) for key in re.findall(r"`(\w+)`", cell)}
    assert returned - {"surprise_mean", "surprise_std", "surprise_max"} <= keys
    for name, setting in settings(RuntimeConfig).items():
        assert f"| `{name}` | {setting.default()} |" in text
