"""Signals and lost processes in the middle of a run: one line says what happened, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from command_runs import Driver, files
from processes import is_running, reads_proc
from waiting import until


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


@reads_proc
def test_ctrl_c_in_rollout():
    with Driver("rollout") as driver:
        assert len(driver.children) == 2, "the reward process and its keeper"
        driver.process.send_signal(signal.SIGINT)
        assert driver.end(50) == (130, "interrupted\n")
        assert not Path("out").exists(), "it has come to nothing"


@reads_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "phase", "number"),
    [  # every pair of a value with another one
        ("inline", "rollout", signal.SIGINT), ("inline", "train", signal.SIGTERM),
        ("spawn", "rollout", signal.SIGTERM), ("spawn", "train", signal.SIGINT),
    ],
)  # fmt: skip
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
