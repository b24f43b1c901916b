"""Runs of a sweep that go on at the same time: their processes, their share of the machine, and what is shown."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from areno.config.run import EngineConfig
from areno.errors import ConfigError
from areno.launch.compose import HydraSession
from areno.launch.side_by_side import JobFailed, JobOutputDisplay, ParallelJobs, job_env_vars
from areno.recipes.sft import SFTConfig
from areno.tracking.reader import RunReader
from tests.helpers import warm_python
from tests.helpers.played import Main, run, task_folder
from tests.helpers.terminal import Terminal
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[2]


# What a run is in these tests: it happens in a process of its own.


def meets(folder: Path, name: str, other: str) -> tuple[float | None, str]:
    """Succeeds if the other run goes on at the same time."""
    print(f"{name} has {os.environ['SHARE']}")
    (folder / name).touch()
    until(lambda: (folder / other).exists())
    return 1.0, ""


def fails(how: str) -> tuple[float | None, str]:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return None, "no rows"


def holds(folder: Path, name: str) -> tuple[float | None, str]:
    """Goes on until a signal comes; the second one counts."""
    got = []

    def hear(number: int, _: object) -> None:
        got.append(number)
        (folder / f"{name} got {len(got)}").touch()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hear)
    (folder / f"{name} begun").write_text(str(os.getpid()))
    until(lambda: len(got) == (2 if name == "deaf" else 1))
    (folder / name).write_text(" ".join(signal.Signals(number).name for number in got))
    raise KeyboardInterrupt


@pytest.mark.slow
def test_runs_go_on_together_and_one_that_fails_alone(tmp_path: Path) -> None:
    told, ended = [], []
    works = {
        0: partial(meets, tmp_path, "a", "b"),
        1: partial(meets, tmp_path, "b", "a"),
        2: partial(fails, "killed"),
        3: partial(fails, ""),
    }
    with ParallelJobs([{"SHARE": "left"}, {"SHARE": "right"}], lambda *line: told.append(line)) as runs:
        futures = [
            runs.start(number, work, lambda: None, lambda *found, number=number: ended.append((number, *found)))
            for number, work in works.items()
        ]
        assert [futures[0].result(), futures[1].result()] == [1.0, 1.0]
        for future, reason in zip(futures[2:], ["was killed by SIGKILL", "no rows"], strict=True):
            with pytest.raises(JobFailed, match=reason):
                future.result()
    assert {number for number, _ in told} == {0, 1}
    assert sorted(line.partition(" has ")[2] for _, line in told) == ["left", "right"]
    assert sorted(ended)[:2] == [(0, 1.0, ""), (1, 1.0, "")]
    assert [objective for _, objective, _ in sorted(ended)[2:]] == [None, None]
    assert "SHARE" not in os.environ


@pytest.mark.slow
def test_what_goes_wrong_with_telling_of_a_run_is_raised_when_it_has_ended(tmp_path: Path) -> None:
    """Such as a full disk, where the sweep keeps its results. Nobody waits for ever, and no other run is lost."""
    ended: list[tuple[float | None, str]] = []

    def told(number: int, line: str) -> None:
        raise OSError("the terminal is gone")

    def full(*_: object) -> None:
        raise OSError("no space left")

    def begin(number: int, name: str, other: str, then: Callable[..., None]) -> Future[float]:
        return runs.start(number, partial(meets, tmp_path, name, other), lambda: None, then)

    with ParallelJobs([{"SHARE": "left"}, {"SHARE": "right"}], told) as runs:
        futures = begin(0, "a", "b", lambda *found: ended.append(found)), begin(1, "b", "a", full)
        for future, message in zip(futures, ("the terminal is gone", "no space left"), strict=True):
            with pytest.raises(OSError, match=message):
                future.result(400)
    assert ended == [(1.0, "")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "signals"), [("hears", "SIGINT"), ("deaf", "SIGINT SIGINT")])
def test_an_interrupt_ends_all(name: str, signals: str, tmp_path: Path) -> None:
    """The second Ctrl-C, too, is passed on. The runs are in sessions of their own, so no terminal has done it."""
    ended = []

    def interrupt() -> None:
        until(lambda: all((tmp_path / f"{run} begun").exists() for run in (name, "hears")))
        signal.raise_signal(signal.SIGINT)

    def once_more() -> None:
        until(lambda: (tmp_path / "hears").exists() and (tmp_path / "deaf got 1").exists())  # two at once are one
        os.kill(os.getpid(), signal.SIGINT)

    def go() -> None:
        with ParallelJobs([{}, {}], lambda *line: None) as runs:
            for number, run_name in enumerate({name, "hears"}):
                runs.start(number, partial(holds, tmp_path, run_name), lambda: None, lambda *found: ended.append(found))
            if name == "deaf":
                second.start()
            interrupt()

    second = threading.Thread(target=once_more)
    with pytest.raises(KeyboardInterrupt):
        go()
    if name == "deaf":
        second.join()
    assert (tmp_path / name).read_text() == signals
    assert ended == [], "what was interrupted has not failed"
    for begun in tmp_path.glob("* begun"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(begun.read_text()), 0)


def test_each_has_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert job_env_vars(3, EngineConfig()) == [{"OMP_NUM_THREADS": "2"}] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = [share["CUDA_VISIBLE_DEVICES"] for share in job_env_vars(2, EngineConfig())]
    assert devices == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 6,5,GPU-a,3")
    devices = [share["CUDA_VISIBLE_DEVICES"] for share in job_env_vars(3, EngineConfig(world_size=1))]
    assert devices == ["7", "6", "5"]
    assert "CUDA_VISIBLE_DEVICES" not in job_env_vars(9, EngineConfig(device="cpu"))[0]
    with pytest.raises(ConfigError, match=r"hydra.launcher.n_jobs: is 3, with 2 devices for each run; there are 5"):
        job_env_vars(3, EngineConfig(world_size=2))
    with pytest.raises(ConfigError, match=r"is 6, with 1 device for each run; there are 5"):
        job_env_vars(6, EngineConfig())


def test_a_sweep_with_mistakes_in_n_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task_folder(tmp_path, monkeypatch)
    main = Main()
    assert run(main, "-m", "seed=1,2", "hydra.launcher.n_jobs=none", "gconfig.top_p=2") == 2
    error = capsys.readouterr().err
    assert "hydra.launcher.n_jobs: is 'none'; a number above 0 is expected" in error
    assert "gconfig.top_p: is 2" in error
    assert run(main, "hydra.launcher.n_jobs=2") == 2
    assert "hydra.launcher.n_jobs: is 2, but this is a single run; add -m" in capsys.readouterr().err
    assert main.calls == []


def test_a_line_for_each_run_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(60, 15)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    with JobOutputDisplay(True, "eval/accuracy") as lines:
        lines.begin(0, ["seed=1"])
        lines.begin(1, ["seed=2"])
        for number in range(1, 40):
            lines.show_line(0, f"10:00:00 step={number}/40 reward_mean=0.5")
            lines.show_line(0, "10:00:00 metric=eval_accuracy value=0.5")
        lines.show_line(1, "10:00:00 warning: all rewards are equal")
        lines.show_line(1, "Traceback (most recent call last):")
        until(lambda: "  step=39/40 reward_mean=0.5" in terminal.written)
        assert "0 runs done, 2 going on" in terminal.written
        lines.end(0, 0.75, "")
        lines.end(1, None, "no rows")
    terminal.close()
    assert terminal.lines == [
        "[0] seed=1",
        "[1] seed=2",
        "[1] 10:00:00 warning: all rewards are equal",
        "[1] Traceback (most recent call last):",
        "[0] eval/accuracy: 0.75",
        "[1] failed: no rows",
        "",
    ]


def test_all_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with JobOutputDisplay(False, "eval/accuracy") as lines:
        lines.begin(7, ["seed=1"])
        lines.show_line(7, "10:00:00 step=1/2 reward_mean=0.5")
        lines.show_line(7, "error: no rows")
        lines.end(7, None, "no rows")
    said = ["[7] seed=1", "[7] 10:00:00 step=1/2 reward_mean=0.5", "[7] error: no rows", "[7] failed"]
    assert capsys.readouterr().err.splitlines() == said


def test_what_cannot_travel_is_an_error() -> None:
    with ParallelJobs([{}], print) as runs:
        for number in range(2):  # and the next run does not wait for the share of this one
            with pytest.raises(ConfigError, match="n_jobs: is more than 1, but"):
                runs.start(number, lambda: (1.0, ""), lambda: None, print)


def test_a_job_can_be_sent_to_the_process_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sent: list[bytes] = []
    with HydraSession(SFTConfig, "quickstart_base", ["seed=1,2"], multirun=True, job_name="sft") as session:
        session.run(lambda job: sent.append(pickle.dumps(job)) or 0.0)
    assert [pickle.loads(job).number for job in sent] == [0, 1]


@pytest.mark.slow
def test_a_sweep_side_by_side_that_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """With the same results, table and files as one run after another; the run with a mistake ends alone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"}
    environment[warm_python.WARM_WORKERS] = "1"
    words = ["-m", "areno.recipes.sft", "--config-name=quickstart_base", "-m", "trial_name=s"]
    words += ["train_dataset.batch_size=8", "recover.freq_steps=1", "seed=1,2", "actor.optimizer.lr=1e-3,nan"]
    words += ["total_train_steps=16", "valid_dataset=null"]

    def start(fileroot: str, n_jobs: int, said: Path) -> warm_python.Started:
        given = [*words, f"cluster.fileroot={tmp_path / fileroot}", f"hydra.launcher.n_jobs={n_jobs}"]
        return warm_python.commands().start(given, tmp_path, environment, said, said)

    began = start("two", 2, tmp_path / "began.txt")
    sweep = tmp_path / "two/quickstart_base/s"
    until(lambda: all(list(sweep.glob(f"{number}/state/step-*")) for number in (0, 2)))
    began.send_signal(signal.SIGINT)
    assert began.wait(300) == 130, (tmp_path / "began.txt").read_text()
    assert (tmp_path / "began.txt").read_text().count("to resume it: the same command with trial_name=s") == 1
    code = start("two", 2, tmp_path / "two.txt").wait(400)
    done = (tmp_path / "two.txt").read_text()
    assert code == 1, done
    n_gone_on = done.count("going on after step")
    assert n_gone_on > 0
    assert n_gone_on + done.count("is finished: its 16 steps are done") == 2
    assert done.count("actor.optimizer.lr: is nan; a finite number is expected") == 4
    start("one", 1, tmp_path / "one.txt").wait(400)
    one = (tmp_path / "one.txt").read_text()
    assert done[done.index(" run  ") :].replace("two/", "one/") == one[one.index(" run  ") :]
    for name in ("sweep.csv", "sweep.json"):
        two = (sweep / name).read_text().replace(str(tmp_path / "two"), str(tmp_path / "one"))
        assert two == (tmp_path / "one/quickstart_base/s" / name).read_text()
    losses = [
        RunReader(tmp_path / f"{root}/quickstart_base/s/2").series("train/loss").values for root in ("one", "two")
    ]
    assert losses[0] == losses[1]
