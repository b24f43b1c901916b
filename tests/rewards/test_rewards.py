"""Reward processes: order, speed, and every way in which a user's function can go wrong."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from areno.config.reward import RewardConfig
from areno.errors import ArenoError, ConfigError
from areno.scoring.pool import RewardPool
from areno.scoring.records import CompletionRecord, RecordedPrompt
from areno.types import PromptItem, RewardRecord, TokenArrays
from areno.user_processes.worker import Worker
from tests.helpers.processes import children, is_running, started, until_ended

REWARD = """
import asyncio, os, signal, subprocess, sys, time
print("noise at import")

def reward_fn(record):
    print("noise", record.completion)
    action = record.completion
    if action == "hang":
        time.sleep(1000)
    if action == "hang in C":
        import re
        re.match("(a+)+$", "a" * 60 + "b")
    if action == "raise":
        raise KeyError("no such thing")
    if action == "reset":
        raise ConnectionResetError("judge hung up")
    if action == "exit":
        sys.exit(3)
    if action == "die":
        os._exit(3)
    if action == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "timeout":
        raise TimeoutError("judge is slow")
    if action == "child":
        subprocess.Popen(["sleep", "61"])
        time.sleep(1000)
    return {"None": None, "nan": float("nan"), "inf": float("inf"), "str": "1.0", "bool": True}.get(action, len(action))

begun = 0

async def judge(record):
    global begun
    begun += 1
    await asyncio.sleep(0.2)
    if record.completion == "together":
        return begun
    if record.completion == "hang":
        await asyncio.sleep(60)
    if record.completion == "block":
        time.sleep(60)
    return len(record.completion)

def fast(record):
    return record.solutions * 2

def wrong(record, other):
    return 0.0

not_a_function = 3
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return path


def pool_of(fn, **settings) -> RewardPool:
    return RewardPool(RewardConfig(fn=str(fn), **{"workers": 2, "timeout_s": 30.0, **settings}))


def pids_of(pool):
    return [worker.process.pid for worker in pool.workers]


def records(*completions):
    return [RewardRecord(prompt="p", completion=text) for text in completions]


def test_each_bad_sample_costs_only_itself(reward_file, caplog):
    actions = [
        "a",
        "None",
        "bb",
        "nan",
        "raise",
        "ccc",
        "inf",
        "str",
        "bool",
        "reset",
        "exit",
        "timeout",
        "die",
        "segfault",
    ]
    with pool_of(reward_file) as pool, caplog.at_level(logging.WARNING, logger="areno"):
        outcomes = pool.score(records(*actions, *["dddd"] * 20))
        again = pool.score(records("a"))
    values = dict(zip(actions, outcomes, strict=False))
    assert [values[a].value for a in ("a", "bb", "ccc", "bool")] == [1.0, 2.0, 3.0, 1.0]
    assert [o.value for o in outcomes[len(actions) :]] == [4.0] * 20
    bad = {a: (values[a].status, values[a].message) for a in actions if values[a].status != "ok"}
    assert set(bad) == {"None", "nan", "raise", "inf", "str", "reset", "exit", "timeout", "die", "segfault"}
    assert all(values[a].value is None for a in bad)
    assert bad["timeout"][0] == "timeout"
    assert {a for a, (status, _) in bad.items() if status == "not_finite"} == {"nan", "inf"}
    assert all(status == "error" for a, (status, _) in bad.items() if a not in ("timeout", "nan", "inf"))
    assert "None" in bad["None"][1]
    assert "a reward is a number" in bad["str"][1]
    assert "finite" in bad["nan"][1]
    assert "KeyError" in bad["raise"][1]
    assert "reward.py:14" in bad["raise"][1]
    assert "judge hung up" in bad["reset"][1]
    assert "exit code 3" in bad["die"][1]
    assert "SIGSEGV" in bad["segfault"][1]
    assert "completion='None'" in caplog.text  # the offending sample is shown
    assert again[0].value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("action", ["hang", "hang in C", "child"])
def test_hanging_call_is_cut_off(reward_file, action):
    before = children()
    with pool_of(reward_file, timeout_s=1.5) as pool:
        pool.wait_ready()
        start = time.monotonic()
        outcomes = pool.score(records("a", action, "bb", "ccc", "dddd", "a", "a", "a", "a", "a", "a", "a"))
        assert time.monotonic() - start < 500.0
    assert outcomes[1].status == "timeout"
    assert "reward.timeout_s" in outcomes[1].message
    assert [o.value for o in outcomes[2:5]] == [2.0, 3.0, 4.0]
    assert [o.status for o in outcomes].count("ok") == 11
    assert set(children()) <= set(before), "a child of the hanging call survived"


def test_async_calls_run_together(reward_file):
    with pool_of(f"{reward_file}:judge") as pool:
        together, *outcomes = pool.score(records("together", *["x" * n for n in range(60)]))
    assert together.value >= 16, "calls that began before the first one was done"
    assert [o.value for o in outcomes] == list(range(60))


@pytest.mark.slow
def test_async_timeouts(reward_file, monkeypatch):
    monkeypatch.setattr("areno.user_processes.worker.ASYNC_SPARE_S", 0.5)
    with pool_of(f"{reward_file}:judge", timeout_s=1.5) as pool:
        outcomes = pool.score(records("a", "hang", "bb", "block", "ccc"))
    assert [o.status for o in outcomes] == ["ok", "timeout", "ok", "timeout", "ok"]
    assert [o.value for o in outcomes] == [1.0, None, 2.0, None, 3.0]


def test_many_are_sent_together_and_come_back_in_order(reward_file, monkeypatch):
    """A message for each would take the driver most of its time."""
    sizes, send = [], Worker.send_calls

    def counted(self, chunk, timeout_s):
        sizes.append(len(chunk))
        send(self, chunk, timeout_s)

    monkeypatch.setattr(Worker, "send_calls", counted)
    with pool_of(f"{reward_file}:fast") as pool:
        rows = [RewardRecord(completion="x" * 200, solutions=n, tokens=list(range(100))) for n in range(4000)]
        outcomes = pool.score(rows)
    assert [o.value for o in outcomes] == [2.0 * n for n in range(4000)]
    assert sum(map(bool, sizes)) < 500


def test_all_failing_is_an_error(reward_file):
    with pool_of(reward_file) as pool, pytest.raises(ArenoError, match=r"reward\.fn: no reward.*KeyError"):
        pool.score(records("raise", "raise"))


def test_unpicklable_record_is_its_own_error(reward_file):
    with pool_of(reward_file) as pool:
        outcomes = pool.score([RewardRecord(completion="a", solutions=lambda: 0), RewardRecord(completion="bb")])
    assert [o.status for o in outcomes] == ["error", "ok"]


@pytest.mark.parametrize(
    ("source", "suffix", "message"),
    [
        ("import nowhere_to_be_found", "", "ModuleNotFoundError: No module named 'nowhere_to_be_found' .*:1"),
        ("def f(:", "", "SyntaxError.*bad.py:1"),
        ("def reward(record): return 1", "", "no function reward_fn; did you mean reward?"),
        ("def other(record): return 1", ":nope", "no function nope; it has other"),
        ("reward_fn = 3", "", "reward_fn in .* is int"),
        ("def reward_fn(a, b): return 1", "", "cannot be called: missing a required argument: 'b'"),
        ("import os; os._exit(5)", "", "importing it ended its process .exit code 5"),
        ("import sys; sys.exit(5)", "", "SystemExit"),
    ],
)
def test_bad_reward_file_is_found_at_the_start(tmp_path, source, suffix, message):
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=r"reward\.fn.*" + message), pool_of(f"{path}{suffix}") as pool:
        pool.wait_ready()


def test_import_that_hangs(tmp_path, monkeypatch):
    path = tmp_path / "slow.py"
    path.write_text("import time; time.sleep(60)")
    monkeypatch.setattr("areno.user_processes.pool.IMPORT_LIMIT_S", 0.5)
    with pytest.raises(ConfigError, match="importing it took more than"), pool_of(path) as pool:
        pool.wait_ready()


@pytest.mark.parametrize(
    ("fn", "message"), [("nowhere.py", "there is no"), ("mat", "did you mean math"), ("x", "built-in")]
)
def test_reward_that_does_not_exist(fn, message):
    with pytest.raises(ConfigError, match=rf"reward\.fn.*{message}"):
        pool_of(fn).start()


def test_close_leaves_no_process(reward_file):
    pool = pool_of(reward_file)
    pool.start()
    pids = pids_of(pool)
    assert len(pids) == 2
    pool.close()
    assert not any(map(is_running, pids))


def test_processes_ignore_interrupts_and_import_little(tmp_path):
    path = tmp_path / "reward.py"
    slow = "{'torch', 'asyncio', 'pydantic', 'importlib.metadata'}"
    path.write_text(f"import sys\ndef reward_fn(record):\n    return float(len({slow} & sys.modules.keys()))\n")
    with pool_of(path) as pool:
        pool.wait_ready()
        pids = pids_of(pool)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert pool.score(records("a", "b"))[0].value == 0.0
        assert pids_of(pool) == pids


@pytest.mark.parametrize("action", ["idle", "hang", "hang in C"])
def test_processes_end_with_a_killed_driver(reward_file, action, tmp_path):
    script = f"""
import sys, time
from areno.scoring.pool import RewardPool
from areno.types import RewardRecord
from areno.config.reward import RewardConfig
pool = RewardPool(RewardConfig(fn={str(reward_file)!r}, timeout_s=0.5, workers=2))
pool.start(); pool.wait_ready()
print("pids", *[worker.process.pid for worker in pool.workers], flush=True)
if {action!r} == "idle":
    time.sleep(60)
pool.score([RewardRecord(completion={action!r})] * 2)
"""
    root = Path(__file__).parents[2]
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root) as driver:
        line = next(line for line in driver.stdout if line.startswith("pids"))
        time.sleep(0.3)
        driver.kill()
        driver.wait()
        until_ended(map(int, line.split()[1:]))


@pytest.mark.slow
def test_built_in_math_reward():
    rows = [
        RewardRecord(completion=text, solutions=gold)
        for text, gold in [
            (r"so 1/2 = \boxed{\frac{1}{2}}", "0.5"),
            (r"\boxed{12}, no, \boxed{13}", 13),
            ("6 * 3 makes\n#### 18", "18"),
            ("the answer is 2,125 dollars", "2125"),
            (r"\boxed{7}", ["6", "7"]),
            (r"\boxed{8}", ["6", "7"]),
            ("nothing", "1"),
            (r"\boxed{1", "1"),
            (r"\boxed{1}", None),
        ]
    ]
    with pool_of("math", timeout_s=20.0) as pool:
        outcomes = pool.score(rows)
    assert [o.value for o in outcomes] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None]
    assert "needs a number or formula" in outcomes[-1].message


def test_record_of_a_completion():
    item = PromptItem(prompt="2+2?", text="<2+2?>", tokens=[1, 2], solutions="4", record={"level": 1})
    arrays = TokenArrays(tokens=np.array([1, 2, 5, 6]), logprobs=np.array([0.0, 0.0, -0.1, -0.2]), oldest_version=0)
    sent = CompletionRecord(RecordedPrompt(item), arrays, "4", rendered="4<end>", step=3, epoch=1)
    assert (sent.prompt, sent.solutions) == ("2+2?", "4")
    record = pickle.loads(pickle.dumps(sent))
    assert isinstance(record, RewardRecord)
    assert (record.prompt, record.completion, record.final_answer, record.solutions) == ("2+2?", "4", "4", "4")
    assert record.messages == [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert (record.rendered_completion, record.prompt_tokens, record.tokens) == ("4<end>", [1, 2], [5, 6])
    assert (record.logprobs, record.loss_mask) == ([-0.1, -0.2], [True, True])
    assert (record.step, record.epoch) == (3, 1)
    assert record.record["level"] == 1


def test_a_function_of_a_script_is_scored_in_the_processes(tmp_path):
    """A closure, a lambda, an async function and an object travel by value; what they hold must be able to."""
    bonus = 2.0

    def closure(record):
        return bonus + len(record.completion)

    class Scorer:
        def __call__(self, record):
            return bonus

    async def slow(record):
        return bonus

    records = [RewardRecord(completion="abc"), RewardRecord(completion="")]
    for function, expected in [
        (closure, [5.0, 2.0]),
        (lambda _: 1, [1.0, 1.0]),
        (Scorer(), [2.0, 2.0]),
        (slow, [2, 2]),
    ]:
        with RewardPool(RewardConfig(workers=1), function) as pool:
            pool.wait_ready()
            assert [outcome.value for outcome in pool.score(records)] == expected
            assert os.getpid() not in pids_of(pool)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("reward.py", "expected a function of one record"),
        (lambda record, other: 0.0, r"reward_fn\(record\) cannot be called"),
        (None, "reward.fn: is null, and no function was given"),
    ],
)
def test_a_function_of_a_script_that_cannot_be_used(function, message):
    pool = RewardPool(RewardConfig(workers=1), function)
    with pytest.raises(ConfigError, match=message), pool:
        pool.wait_ready()


def test_a_function_that_holds_what_cannot_travel():
    numbers = (n for n in range(3))
    pool = RewardPool(RewardConfig(workers=1), lambda record: next(numbers))
    with pytest.raises(ConfigError, match="cannot be sent to the reward processes"):
        pool.start()
