"""Signals and lost processes in the middle of a run: one line says what happened, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import areno
from areno.files import interrupts
from tests.helpers.command_runs import Driver, files
from tests.helpers.processes import is_running, reads_proc
from tests.helpers.waiting import until


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


SIGNALLED = """
import importlib.abc, os, signal, sys

class Signalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["SIGNALLED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Signalled())
"""


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["-m", "areno.cli", "runs"], "areno.errors"),
        (["-m", "areno.cli", "runs"], "rich"),  # in the midst of the command
        (["-X", "dev", "-m", "areno.recipes.gspo", "--config-name=quickstart"], "areno.config"),
        (["areno", "runs"], "areno.cli.__main__"),
    ],
)
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, words: list[str], module: str):
    Path("sitecustomize.py").write_text(SIGNALLED)
    Path("areno").write_text("import sys\nfrom areno.cli.__main__ import main\nsys.exit(main())\n")
    Path("outputs").mkdir()
    path = os.pathsep.join([str(tmp_path), str(Path(areno.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "SIGNALLED_AT": module}
    ended = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("words", "is_command"),
    [
        ("-m areno.recipes.gspo seed=1", True),
        ("-u -X dev -m areno.cli train", True),
        ("/usr/bin/areno runs", True),
        ("-m areno.bench", True),
        ("-m pytest areno", False),
        ("script.py areno", False),
        ("", False),
        ("-c from-multiprocessing.spawn --multiprocessing-fork", False),
        ("-m areno.scoring.process", False),
    ],
)
def test_only_a_command_ends_at_once(words: str, is_command: bool):
    """A library, or a process that multiprocessing has started, keeps its handlers."""
    assert interrupts.is_command(words.split()) is is_command


@pytest.mark.slow
@reads_proc
def test_ctrl_c_in_rollout():
    with Driver("rollout") as driver:
        assert len(driver.children) == 2, "the reward process and its supervisor"
        driver.process.send_signal(signal.SIGINT)
        assert driver.end(50) == (130, "interrupted\n")
        left = [name for name in files("out/quickstart/t") if Path("out/quickstart/t", name).is_file()]
        assert left == ["config.yaml", "logs/metrics.jsonl", "logs/run.log", "overrides.yaml", "versions.json"]


@reads_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "phase", "number"),
    [  # every pair of a value with another one
        ("inline", "rollout", signal.SIGINT),
        ("inline", "train", signal.SIGTERM),
        ("spawn", "rollout", signal.SIGTERM),
        ("spawn", "train", signal.SIGINT),
    ],
)
def test_interrupted(workers, phase, number):
    with Driver(phase, f"engine.workers={workers}") as driver:
        driver.process.send_signal(number)
        expected = {signal.SIGINT: (130, "interrupted\n"), signal.SIGTERM: (143, "terminated\n")}
        assert driver.end(100) == expected[number]  # an update may take ten seconds to its end
        if Path("out").exists():  # the rollout was recorded
            assert files("out/quickstart/t/checkpoints") == []


@reads_proc
@pytest.mark.slow
def test_ctrl_c_twice():
    with Driver("train", "engine.workers=spawn") as driver:
        driver.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        driver.process.send_signal(signal.SIGINT)
        code, _ = driver.end(50)
        assert code in (130, -signal.SIGINT)


@reads_proc
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_killed_worker(phase):
    with Driver(phase, "engine.workers=spawn", "recover.retries=0") as driver:
        os.kill(driver.worker(), signal.SIGKILL)
        code, line = driver.end(50)
        assert code == 1
        assert re.search(r"^error: worker 0 \(cpu\) was killed by SIGKILL", line)


@reads_proc
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_killed_driver(phase):
    with Driver(phase, "engine.workers=spawn") as driver:
        assert len(driver.children) >= 2
        driver.process.send_signal(signal.SIGKILL)
        driver.process.wait()
        until(lambda: not any(map(is_running, driver.children)), 50)
