"""Reward functions that fork, start processes of their own, are stopped or slow, and numbers that are no rewards."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areno import trace
from areno.config.reward import RewardConfig
from areno.errors import ConfigError, EngineError, printable
from areno.scoring.pool import RewardPool, no_reward_error
from areno.trainers.reward_sources import add_model_scores
from areno.types import RewardOutcome, RewardRecord
from areno.user_processes.worker import OutputLogger
from tests.helpers.waiting import until

reads_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and a subreaper")

FORKS = """
import multiprocessing, os, sys

def reward_fn(record):
    action = record.completion
    if action in ("fork", "raise"):
        copy = os.fork()
        if copy == 0 and action == "raise":
            raise KeyError("in the copy")
        if copy:
            os.waitpid(copy, 0)  # or it might come back too late to be told
    if action == "exit" and os.fork() == 0:
        sys.exit(0)
    if action == "process":
        process = multiprocessing.get_context("fork").Process(target=len, args=("",))
        process.start()
        process.join()
    return len(action)

async def judge(record):
    return reward_fn(record)
"""

STARTS = """
import os, subprocess, sys, time

def reward_fn(record):
    if record.completion == "session":
        subprocess.Popen(["sleep", "71"], start_new_session=True)
    if record.completion == "orphan":
        subprocess.run("(setsid sleep 72 &); exit 0", shell=True)
    if record.completion == "dies":
        subprocess.Popen(["sleep", "73"], start_new_session=True)
        os._exit(3)
    if record.completion == "hangs":
        subprocess.Popen(["sleep", "74"], start_new_session=True)
        time.sleep(60)
    if record.completion == "exec":
        os.execv("/bin/sleep", ["sleep", "75"])
    print("scored", record.completion)
    return len(record.completion)
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "reward.py"

    def write(source: str) -> Path:
        path.write_text(source)
        return path

    return write


def pool_of(fn, **settings) -> RewardPool:
    return RewardPool(RewardConfig(fn=str(fn), **{"workers": 1, "timeout_s": 30.0, **settings}))


def records(*completions):
    return [RewardRecord(prompt="p", completion=text) for text in completions]


def below(pid: int) -> dict[int, str]:
    """The command lines of all living processes that a process has started, and theirs."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return {pid: command_of(pid) for pid in found}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def started_below(pid: int, n_sleeping: int) -> dict[int, str]:
    """`below`, once so many of them sleep: a shell starts its commands in its own time."""

    def sleeping() -> list[str]:
        return [command for command in below(pid).values() if command.startswith("sleep 7")]

    until(lambda: len(sleeping()) == n_sleeping, pause_s=0.05, found=sleeping)
    return below(pid)


def until_gone(commands: dict[int, str]) -> None:
    """Wait until none of the processes runs its command any more: another may have got the number of one."""
    until(lambda: not any(command and command_of(pid) == command for pid, command in commands.items()), pause_s=0.05)


@pytest.mark.parametrize("function", ["reward_fn", "judge"])
@pytest.mark.parametrize("action", ["fork", "raise"])
def test_a_fork_that_comes_back_is_an_error_of_its_sample(reward_file, function, action):
    with pool_of(f"{reward_file(FORKS)}:{function}") as pool:
        outcomes = pool.score(records("a", action, "bb", action, "ccc"))
        again = pool.score(records("a"))
    assert [outcome.value for outcome in outcomes] == [1.0, None, 2.0, None, 3.0]
    assert [outcome.status for outcome in outcomes].count("error") == 2
    assert "the forked process returned too; end it with os._exit()" in outcomes[1].message
    assert again[0].value == 1.0


def test_forks_that_end_properly_are_no_error(reward_file):
    with pool_of(reward_file(FORKS)) as pool:
        outcomes = pool.score(records("exit", "process", "exit"))
    assert [outcome.value for outcome in outcomes] == [4.0, 7.0, 4.0]


def test_a_fork_while_importing(reward_file):
    path = reward_file("import os\nif copy := os.fork(): os.waitpid(copy, 0)\ndef reward_fn(record): return 1.0\n")
    with pytest.raises(ConfigError, match=r"reward\.fn: .*importing it forked, and"), pool_of(path) as pool:
        pool.wait_ready()


@reads_proc
@pytest.mark.parametrize("action", ["session", "orphan", "dies", "hangs", "exec"])
def test_what_a_function_starts_ends_with_the_pool(reward_file, action, monkeypatch):
    # A process that became another one has no exit code.
    monkeypatch.setattr("areno.user_processes.worker.EXIT_CODE_S", 0.2)
    n_sleeping = int(action in ("session", "orphan"))  # the others have lost their process, and are gone with it
    before = below(os.getpid())  # of other tests, such as multiprocessing's resource tracker
    with pool_of(reward_file(STARTS), timeout_s=1.5 if action == "hangs" else 30.0) as pool:
        outcomes = pool.score(records("a", action, "bb"))
        started = started_below(os.getpid(), n_sleeping)
    started = {pid: command for pid, command in started.items() if pid not in before}
    assert [outcome.value for outcome in outcomes][::2] == [1.0, 2.0]
    assert any("supervisor" in command for command in started.values())
    assert sum(command.startswith("sleep 7") for command in started.values()) == n_sleeping
    until_gone(started)


@reads_proc
def test_a_killed_driver_leaves_no_process_and_nobody_holds_its_output(reward_file):
    script = f"""
import time
from areno.config.reward import RewardConfig
from areno.scoring.pool import RewardPool
from areno.types import RewardRecord
pool = RewardPool(RewardConfig(fn={str(reward_file(STARTS))!r}, workers=1))
pool.start()
pool.score([RewardRecord(completion="session"), RewardRecord(completion="orphan")])
print("scored", flush=True)
time.sleep(60)
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
    )
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "scored\n", "what the function prints is not on the driver's output"
        started = started_below(driver.pid, 2)
        assert sum(command.startswith("sleep 7") for command in started.values()) == 2
    finally:
        driver.kill()
        driver.wait()
    start = time.monotonic()
    assert driver.stdout.read() == ""
    assert time.monotonic() - start < 500.0
    until_gone(started)


def test_what_a_function_prints_is_logged_line_by_line(reward_file, caplog, capfd):
    with caplog.at_level(logging.INFO, logger="areno"), pool_of(reward_file(STARTS), workers=2) as pool:
        pool.score(records(*["x" * n for n in range(1, 9)]))
    lines = {record.getMessage() for record in caplog.records}
    assert lines >= {f"reward: scored {'x' * n}" for n in range(1, 9)}
    assert capfd.readouterr().out == ""


NOISY = """
import sys

def reward_fn(record):
    if record.completion == "raise":
        raise ValueError("\\x1b[2J\\nlast")
    print("\\x1b[2J\\x07\\rclear\\u202e\\ttab é")
    for _ in range(300):
        print("x" * 1000)
    return 1.0
"""


def test_what_a_function_prints_is_limited_for_each_step_and_cannot_move_the_terminal(reward_file, caplog):
    with caplog.at_level(logging.INFO, logger="areno"), pool_of(reward_file(NOISY), workers=2) as pool:
        pool.score(records("a", "b", "raise"))
    lines = [record.getMessage() for record in caplog.records]
    assert "reward: \\x1b[2J\\x07\\rclear\\u202e\ttab é" in lines
    assert [line for line in lines if "more than" in line] == [
        "reward: more than 256 KiB printed in this step; the rest is left out"
    ]
    assert 2**18 < sum(len(line) + 64 for line in lines) < 2**18 + 20_000  # 64 for what the log writes before a line
    assert any("ValueError: \\x1b[2J last" in line for line in lines)
    assert all(printable(line) == line for line in lines)


def test_each_step_may_print_again(caplog):
    output = OutputLogger("reward")
    with caplog.at_level(logging.INFO, logger="areno"):
        output.log(io.BytesIO(b"x" * 2**18 + b"\nlast\n"))
        output.begin_step()
        output.log(io.BytesIO(b"again\n"))
    lines = [record.getMessage() for record in caplog.records]
    assert "reward: last" not in lines
    assert lines[-1] == "reward: again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "function"),
    [
        ("time.sleep(60)", "reward_fn"),
        pytest.param("time.sleep(60)", "judge", marks=pytest.mark.slow),  # an async function has some seconds to spare
        ("os._exit(3)", "reward_fn"),
        ("os._exit(3)", "judge"),
    ],
)
def test_a_call_that_ends_its_process_is_in_the_trace(reward_file, function, action):
    """Until the process was given up: otherwise the time would count as that of the driver."""
    source = f"import os, time\ndef reward_fn(record):\n    if record.completion == 'bad': {action}\n    return 1.0\n"
    source += "async def judge(record): return reward_fn(record)\n"
    trace.begin()
    try:
        with pool_of(f"{reward_file(source)}:{function}", timeout_s=1.5) as pool:
            pool.score(records("a", "bad", "bb"))
        calls = {event[4]["sample"]: event[3] - event[2] for event in trace.drain_events() if event[1] == "reward"}
    finally:
        trace.end()
    assert calls.keys() == {0, 1, 2}
    if "sleep" in action:
        assert calls[1] > 1e9


@pytest.mark.slow
@reads_proc
@pytest.mark.parametrize("which", ["all", "worker"])
def test_a_stopped_process_is_ended_by_the_timeout(reward_file, which, monkeypatch):
    """It reads nothing, so what it is sent must not make the driver wait: a large record does not fit the socket."""
    large = RewardRecord(completion="a", solutions="x" * 5_000_000)
    monkeypatch.setattr("areno.user_processes.worker.EXIT_CODE_S", 1000.0)
    before = below(os.getpid())
    with pool_of(reward_file(STARTS), timeout_s=2.0, workers=2) as pool:
        pool.wait_ready()
        stopped = {pid: command for pid, command in below(os.getpid()).items() if pid not in before}
        [supervisor, *_] = [worker.process.pid for worker in pool.workers]
        pids = [supervisor, *below(supervisor)] if which == "all" else list(below(supervisor))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        outcomes = pool.score([large, large, large, large])
        assert time.monotonic() - start < 500.0, "its supervisor is not waited for"
    assert sorted(outcome.status for outcome in outcomes) == ["ok", "ok", "ok", "timeout"]
    until_gone(stopped)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1e308", "returned 1e+308; a reward is at most 3.4e+38 (float32)"),
        ("-1e308", "returned -1e+308; a reward is at most 3.4e+38 (float32)"),
        ("3.5e38", "returned 3.5e+38; a reward is at most 3.4e+38 (float32)"),
        ("10 ** 400", "int too large to convert to float"),
        ("float('-inf')", "returned -inf; a reward is a finite number"),
    ],
)
def test_a_number_beyond_float32_is_no_reward(reward_file, caplog, value, message):
    path = reward_file(f"def reward_fn(record):\n    return {value} if record.completion == 'bad' else 3.4e38\n")
    with pool_of(path) as pool:
        outcomes = pool.score(records("good", "bad"))
    assert outcomes[0].value == 3.4e38
    assert outcomes[1] == RewardOutcome(None, "error" if "convert" in message else "not_finite", message)
    assert "completion='bad'" in caplog.text


def test_a_sum_with_the_reward_model_that_is_no_reward(caplog):
    given = [RewardOutcome(1.0), RewardOutcome(None, "timeout", "slow"), RewardOutcome(3e38), RewardOutcome(0.0)]
    found = add_model_scores(records("a", "b", "c", "d"), given, [0.5, 1.0, 3e38, math.nan])
    assert found[0] == RewardOutcome(1.5, parts={"fn": 1.0, "model": 0.5})
    assert [(outcome.value, outcome.status) for outcome in found[2:]] == [(None, "not_finite")] * 2
    assert found[1] == given[1]
    assert found[2].message == "with the reward model: 6e+38; a reward is at most 3.4e+38 (float32)"
    assert found[3].message == "with the reward model: nan; a reward is a finite number"
    assert "completion='c'" in caplog.text
    assert "completion='b'" not in caplog.text
    error = no_reward_error(add_model_scores(records("a", "b"), None, [math.nan, math.nan]))
    assert str(error).startswith("reward.path: no reward could be computed for any of the 2 samples; the last: not_fi")
    assert add_model_scores(records("a"), None, [0.5]) == [RewardOutcome(0.5)]


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"timeout_s": 1e12}, ["reward.timeout_s: is 1000000000000.0; it must be at most 86400"]),
        ({"workers": 100_000}, ["reward.workers: is 100000; it must be at most 512"]),
        ({"timeout_s": 1e12, "workers": 0}, ["timeout_s: is 1000000000000.0", "workers: is 0"]),
    ],
)
def test_bounds(settings, messages):
    with pytest.raises(ConfigError) as caught:
        RewardConfig(fn="math", **settings)
    for message in messages:
        assert message.removeprefix("reward.") in str(caught.value)


def test_processes_that_cannot_be_started(reward_file, monkeypatch):
    started = []

    def popen(*args, **settings):
        if len(started) == 2:
            raise OSError(24, "Too many open files")
        started.append(Popen(*args, **settings))
        return started[-1]

    Popen = subprocess.Popen
    monkeypatch.setattr("areno.user_processes.worker.subprocess.Popen", popen)
    with pytest.raises(EngineError, match=r"process 3 of 4 cannot be started: .*Too many.*; lower reward\.workers"):
        pool_of(reward_file(STARTS), workers=4).start()
    assert all(process.poll() is not None for process in started)


SLOW = """
import time

def reward_fn(record):
    time.sleep(60 if record.completion == "hang" else 0.0)
    return 1.0
"""


@pytest.mark.slow
def test_slow_rewards_are_told_and_not_each_second(reward_file, caplog, monkeypatch):
    monkeypatch.setattr("areno.user_processes.pool.SLOW_S", 0.3)
    with caplog.at_level(logging.INFO, logger="areno"), pool_of(reward_file(SLOW), timeout_s=0.5) as pool:
        pool.wait_ready()
        start = time.monotonic()
        outcomes = pool.compute_outcomes(records(*["hang"] * 3))
        seconds = time.monotonic() - start
    assert [outcome.status for outcome in outcomes] == ["timeout"] * 3
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rewards: ")]
    assert 1 <= len(lines) <= 1 + math.log2(seconds / 0.3), lines
    for words in (
        " of 3 samples wait after",
        "timeouts), for at most ",
        "raise reward.workers (1) or lower",
        "(0.5 s)",
    ):
        assert words in lines[0]


@pytest.mark.slow
def test_when_nobody_answers_any_more_the_rest_is_given_up(reward_file, caplog, monkeypatch):
    """A judge that goes down in a later step: four timeouts of a process and a long silence are enough."""
    monkeypatch.setattr("areno.scoring.pool.QUIET_S", 1.0)
    with pool_of(reward_file(SLOW)) as pool:
        patient, hasty = pool.config, dataclasses.replace(pool.config, timeout_s=0.5)
        pool.score(records("a"))
        pool.config = hasty
        outcomes = pool.compute_outcomes(records(*["hang"] * 100))
        pool.config = patient
        assert pool.score(records("a"))[0].value == 1.0, "the pool still works"
    assert [outcome.status for outcome in outcomes] == ["timeout"] * 100
    assert outcomes[0].message == "no answer within 0.5 s (reward.timeout_s)"
    assert outcomes[-1].message == "not scored: the 4 calls before it had no answer within 0.5 s (reward.timeout_s)"
    assert "giving up" in caplog.text


def test_an_import_that_takes_long_is_told(reward_file, caplog, monkeypatch):
    monkeypatch.setattr("areno.user_processes.pool.SLOW_S", 0.2)
    path = reward_file("import time\ntime.sleep(0.8)\ndef reward_fn(record): return 1.0\n")
    with caplog.at_level(logging.INFO, logger="areno"), pool_of(path) as pool:
        pool.wait_ready()
    assert "reward.fn: importing" in caplog.text


def test_an_error_that_has_no_text_is_told_by_its_place(reward_file):
    class_ = "class Mute(Exception):\n    def __str__(self): raise ValueError\n"
    path = reward_file(class_ + "def reward_fn(record):\n    raise Mute\n")
    with pool_of(path) as pool:
        outcomes = pool.compute_outcomes(records("a"))
    assert outcomes[0].message == f"Mute ({path.name}:4)"
