"""Runs of the real command that hang: each ends by itself with a line that says where, and leaves no process."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areno.engine.processes import watchdog
from areno.recipes.gspo import GSPOConfig
from tests.helpers import warm_python
from tests.helpers.command_runs import Driver, run
from tests.helpers.processes import children, reads_proc, until_ended
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@reads_proc
@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_a_stopped_worker_ends_the_run(phase: str) -> None:
    with Driver(phase, "engine.workers=spawn", "engine.stall_timeout_s=25", "recover.retries=0") as driver:
        os.kill(driver.worker(), signal.SIGSTOP)
        code, line = driver.end(400)
        assert code == 1
        assert re.search(
            r"^error: worker 0 \(cpu\) made no progress for \d+ s in \w+, since it is stopped \(SIGSTOP\)", line
        )
        command = "train" if phase == "train" else "(decoding|submit|begin_rollout)"
        text = "".join(driver.lines)
        assert re.search(f"command {command} in the run > {phase}\n", text)
        assert "a stopped process shows no stack" in text
        assert "Thread MainThread:" in text
        for log in Path("out").rglob("run.log"):  # where the rollout was recorded
            assert "Thread MainThread:" in log.read_text()


@pytest.fixture
def be_strict(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the limit of the run's watchdog: as soon as what hangs has begun, since all before may take its time."""
    dogs: list[watchdog.Watchdog] = []
    init = watchdog.Watchdog.__init__
    monkeypatch.setattr(watchdog.Watchdog, "__init__", lambda self, *given: dogs.append(self) or init(self, *given))
    return lambda limit_s: setattr(dogs[-1], "limit_s", limit_s)


def test_a_loss_that_never_returns_ends_the_run(
    be_strict: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def never(*_: Any) -> Any:
        be_strict(2.0)
        time.sleep(600)

    monkeypatch.setattr(GSPOConfig, "loss_fn", lambda self: never)
    before = children()
    assert run("recover.retries=0") == 1
    error = capsys.readouterr().err
    assert "in never\n" in error
    assert error.rstrip().endswith(
        "error: worker 0, which lives in the driver (train), made no progress for 2 s in the run > train; "
        "raise engine.stall_timeout_s if this can take longer"
    )
    assert set(children()) <= set(before)


def test_a_reward_that_never_returns_is_ended_by_its_own_limit(be_strict: Callable[[float], None], capsys: Any) -> None:
    begun = Path("begun").absolute()
    Path("mine.py").write_text(
        f"import time\ndef reward_fn(record):\n    open({str(begun)!r}, 'w').close()\n    time.sleep(600)\n"
    )
    before = children()

    def wait() -> None:
        until(begun.exists)
        be_strict(1.5)

    threading.Thread(target=wait, daemon=True).start()
    assert run("reward.fn=mine.py", "reward.timeout_s=3", "actor.max_skipped_steps=1") == 1
    error = capsys.readouterr().err
    assert "no progress" not in error
    assert re.search(r"rewards: \d of 4 samples wait after \d+ s \(\d timeouts\), for at most", error)
    assert "error: reward.fn: no reward could be computed for any sample of a step" in error
    assert set(children()) <= set(before)


STUBBORN = """
    import sys, time
    from areno.engine.processes import watchdog
    from areno.recipes import gspo
    from areno.launch import command

    dogs, init = [], watchdog.Watchdog.__init__
    watchdog.Watchdog.__init__ = lambda self, *given: dogs.append(self) or init(self, *given)

    def never(*_):
        dogs[-1].limit_s = 6.0
        while True:
            try:
                time.sleep(600)
            except BaseException:
                print("not me", file=sys.stderr, flush=True)

    gspo.GSPOConfig.loss_fn = lambda self: never
    command.run_algorithm(gspo.ALGORITHM)
"""


@reads_proc
def test_a_driver_that_cannot_be_interrupted_ends(tmp_path: Path) -> None:
    Path("stubborn.py").write_text(textwrap.dedent(STUBBORN))
    quick = ["total_train_steps=1", "train_dataset.batch_size=2", "gconfig.n_samples=2", "reward.workers=1"]
    words = ["stubborn.py", *quick, "engine.device=cpu", "cluster.fileroot=out", "valid_dataset=null"]
    lines, below = [], []
    with warm_python.said_by(words) as (process, said):
        for line in said:
            lines.append(line)
            if line == "not me\n":
                below = children(process.pid)
        process.wait(200)
        error = "".join(lines)
        assert process.returncode == 1
        assert error.count("not me") == 1
        assert error.count("in never\n") == 2, "before the interrupt, and before the end"
        assert "error: worker 0, which lives in the driver (train), made no progress" in error.splitlines()[-1]
        assert error.rstrip().endswith("; the process ends")
        assert below, "the reward process and its supervisor"
        until_ended(below, 200)
