"""Samples are scored while others are drawn: with the same outcomes, and without harm to the rollout."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import transformers

from areno.api.metrics import Stopwatch
from areno.api.session import CompletionLengthEstimator
from areno.config.reward import RewardConfig
from areno.data.encode import decode_all
from areno.scoring.pool import RewardPool, Scoring, _ScoringCalls
from areno.trainers import reward_sources
from areno.types import RewardOutcome, RewardRecord
from areno.user_processes import pool as cores
from areno.user_processes.worker import Worker
from tests.helpers.policy_runs import MODEL, play
from tests.helpers.waiting import until

REWARD = """
import gc, os, time
from multiprocessing.connection import Connection

def reward_fn(record):
    text = record.completion
    if text == "breaks":
        connection = next(found for found in gc.get_objects() if isinstance(found, Connection))
        os.write(connection.fileno(), b"\\0\\0\\0\\2no")
        os._exit(3)
    if text == "slow":
        time.sleep(60)
    if text == "fails":
        raise ValueError("no")
    if text == "dies":
        os._exit(3)
    return float(len(text))
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    open_pools: list[RewardPool] = []

    def make(**settings: Any) -> RewardPool:
        config = RewardConfig(**{"fn": str(file), "workers": 2, "timeout_s": 30.0, **settings})
        made = RewardPool(config)
        made.start()
        open_pools.append(made)
        return made

    yield make
    for each in open_pools:
        each.close()


def record(text: str) -> RewardRecord:
    return RewardRecord(completion=text)


def wait_for(scoring: Scoring, n: int) -> None:
    """Until the thread has so many outcomes, which nobody has asked for."""
    until(lambda: len(scoring._calls.outcomes) >= n)
    assert len(scoring._calls.outcomes) == n


def test_outcomes_are_there_before_all_samples_are(pool: Callable[..., RewardPool]) -> None:
    texts = ["a", "fails", "ccc", "dies", "eeeee", "f" * 100_000]  # the last one is more than a socket holds
    with pool().scoring() as scoring:
        scoring.add({5: record(texts[5]), 3: record(texts[3])})  # a process dies meanwhile
        scoring.add({1: record(texts[1])})
        wait_for(scoring, 3)
        scoring.add({place: record(texts[place]) for place in (4, 0, 2)})
        found = scoring.collect_outcomes()
    statuses = [found[place].status for place in range(6)]
    assert statuses == ["ok", "error", "ok", "error", "ok", "ok"]
    assert [found[place].value for place in range(6)] == [1.0, None, 3.0, None, 5.0, 100_000.0]
    assert "no" in found[1].message
    assert "ended its process (exit code 3)" in found[3].message


@pytest.mark.parametrize(
    ("call_s", "n_calls", "is_async", "sizes"),
    [
        (1.0, 64, False, [8, 7, 7, 6]),
        (1e-5, 64, False, [32, 16, 8, 4]),
        (1e-3, 64, False, [8, 7, 7, 6]),
        (5e-5, 1024, False, [100, 100]),  # a chunk of a plain function has 5 ms of calls
        (5e-5, 1024, True, [64, 64]),
    ],
)
def test_fast_calls_are_sent_many_at_a_time(call_s: float, n_calls: int, is_async: bool, sizes: list[int]) -> None:
    calls = _ScoringCalls(call_s)
    for position in range(n_calls):
        calls.add(position, record("a"))
    assert [len(calls.next_chunk(2, is_async)) for _ in sizes] == sizes


def test_messages_arrive_as_a_whole_however_the_socket_cuts_them() -> None:
    worker = object.__new__(Worker)  # without its process
    worker.messages, worker._unread = deque(), bytearray()
    worker.connection, theirs = Pipe()
    sent = [pickle.dumps(message) for message in ("a", "", "b" * 70_000, "long")]
    lengths = [len(message).to_bytes(4, "big") for message in sent[:3]]
    lengths.append((-1).to_bytes(4, "big", signed=True) + len(sent[3]).to_bytes(8, "big"))  # as for more than 2 GB
    written = b"".join(length + message for length, message in zip(lengths, sent, strict=True))
    with worker.connection, theirs:
        for cuts in ([30_001, 60_002], range(len(written) - 30, len(written)), [4, 5, 17]):
            borders = [0, *cuts, len(written)]
            for start, end in itertools.pairwise(borders):
                os.write(theirs.fileno(), written[start:end])
                worker.read_messages()
            theirs.send("by Connection")
            worker.read_messages()
            found = [pickle.loads(message) for message in worker.messages]
            assert found == ["a", "", "b" * 70_000, "long", "by Connection"]
            worker.messages.clear()
        os.write(theirs.fileno(), written[:30])
        theirs.close()
        worker.read_messages()
        with pytest.raises(EOFError):
            worker.read_messages()


def test_answers_before_a_broken_message_count(
    pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pool(workers=1)
    one.wait_ready()
    wait = one._wait_for_workers
    monkeypatch.setattr(
        one, "_wait_for_workers", lambda *args: (time.sleep(0.1), wait(*args))
    )  # so that it reads all at once
    found = one.compute_outcomes([record(text) for text in ("a", "a", "breaks", "a")])
    assert [outcome.value for outcome in found] == [1.0, 1.0, None, 1.0]
    assert "ended its process (exit code 3)" in found[2].message


def test_a_pool_knows_the_time_of_a_call_from_the_step_before(pool: Callable[..., RewardPool]) -> None:
    one = pool(workers=1)
    assert one.call_s == math.inf
    one.compute_outcomes([record("a")] * 40)
    assert 0 < one.call_s < 1
    with one.scoring() as scoring:
        assert scoring._calls.mean_call_s == one.call_s


@pytest.mark.slow
def test_a_slow_call_times_out_while_nobody_waits(pool: Callable[..., RewardPool]) -> None:
    with pool(timeout_s=1.5).scoring() as scoring:
        scoring.add({0: record("slow"), 1: record("b")})
        wait_for(scoring, 2)
        scoring.add({2: record("cc")})
        found = scoring.collect_outcomes()
    assert [(found[place].status, found[place].value) for place in range(3)] == [
        ("timeout", None),
        ("ok", 1.0),
        ("ok", 2.0),
    ]


def test_what_is_left_early_is_dropped_and_the_next_samples_are_scored(pool: Callable[..., RewardPool]) -> None:
    two = pool()
    with two.scoring() as scoring:
        scoring.add({0: record("slow"), 1: record("slow"), 2: record("c")})
    assert not scoring._thread.is_alive()
    assert two.compute_outcomes([record("dd")]) == [RewardOutcome(2.0)]
    with two.scoring() as nothing:
        assert nothing.collect_outcomes() == {}


def test_a_process_that_cannot_start_again_is_told_where_samples_are_added(
    pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    one = pool(workers=1)
    one.wait_ready()
    (tmp_path / "reward.py").write_text("raise RuntimeError('gone')")
    with one.scoring() as scoring:
        scoring.add({0: record("dies")})
        scoring._thread.join(60)
        with pytest.raises(Exception, match="gone"):
            scoring.add({1: record("b")})


# In a run


SMALL = ["reward.workers=1", "gconfig.max_new_tokens=12", "total_train_steps=2"]
TIMES = (
    "time/",
    "memory/",
    "train/step_",
    "train/tokens_per_second",
    "rollout/tokens_per_second",
    "train/memory",
    "train/host_memory",
)


def travels() -> Callable[[Any], float]:
    """A function that is sent by value: the reward process does not import this module, which takes seconds."""

    def by_length(record: Any) -> float:
        if len(record.tokens) == 5:
            raise ValueError("five")
        return float(len(record.tokens) % 3)

    return by_length


def played(folder: Path, *settings: str) -> tuple[list[Any], dict[str, list[float]], list[Any]]:
    run = play("gspo", folder, *SMALL, *settings, reward_fn=travels())
    scalars = {name: run.series(name) for name in sorted(run.names()) if not name.startswith(TIMES)}
    names = ("tokens", "logprobs", "advantages", "prompt_mask")
    rows = [[[*(list(vars(row)[name]) for name in names), row.reward] for row in step] for step in run.rows]
    return [run.samples(step) for step in (1, 2)], scalars, rows


@pytest.mark.slow
def test_samples_rows_and_metrics_are_those_of_scoring_after_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped = played(tmp_path / "a")
    taken: list[Any] = []
    finish = reward_sources.Scorer.finish

    def finish_late(self: reward_sources.Scorer) -> Any:
        for outputs in taken:
            self._record_outputs(outputs)
        taken.clear()
        return finish(self)

    monkeypatch.setattr(reward_sources.Scorer, "score_outputs", lambda self, outputs: taken.append(outputs))
    monkeypatch.setattr(reward_sources.Scorer, "finish", finish_late)
    assert played(tmp_path / "b") == overlapped
    samples, scalars, _ = overlapped
    assert {sample["status"] for step in samples for sample in step} == {"ok", "error"}
    assert sum(scalars["rollout/reward_errors"])


@pytest.mark.slow
def test_two_copies_give_the_samples_of_one(tmp_path: Path) -> None:
    (one, *_), (two, *_) = played(tmp_path / "1"), played(tmp_path / "2", "engine.world_size=2")
    first, other = (
        [(sample["token_ids"], sample["reward"], sample["status"]) for sample in run[0]] for run in (one, two)
    )
    assert first == other


def test_an_interrupt_ends_a_rollout_whose_samples_are_being_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def interrupt() -> None:
        if began.wait(500):  # or another test would be interrupted
            os.kill(os.getpid(), signal.SIGINT)

    class Watched(reward_sources.Scorer):
        def score_outputs(self, outputs: Any) -> None:
            super().score_outputs(outputs)
            if outputs:
                began.set()
                time.sleep(0.2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started = time.monotonic()
    monkeypatch.setattr("areno.trainers.rollout.Scorer", Watched)
    with pytest.raises(KeyboardInterrupt):
        play("gspo", tmp_path / "run", *SMALL, reward_fn=lambda record: time.sleep(1000))
    thread.join()
    assert time.monotonic() - started < 500
    assert not [thread for thread in threading.enumerate() if thread.name == "areno-rewards"]


def test_the_phases_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Stopwatch()
    now[0] += 1.0
    with clock.phase("rollout"):
        now[0] += 2.0
    now[0] += 0.5
    clock.close_step()
    assert clock.seconds == {"rollout": 2.0, "other": 1.5}
    assert clock.total_seconds == 3.5
    clock.reset()
    clock.close_step()
    assert clock.seconds == {"other": 0.0}


# What is used beside


def test_rows_are_decoded_together_as_they_are_alone() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    rows = [[], [5], list(range(len(tokenizer))), [tokenizer.eos_token_id] * 2, [7, tokenizer.eos_token_id]]
    many = rows * 100
    assert sum(map(len, many)) > 2048  # by several threads
    for skip in (True, False):
        expected = tokenizer.batch_decode(rows, skip_special_tokens=skip)
        assert decode_all(tokenizer, rows, skip) == expected
        assert decode_all(tokenizer, many, skip) == 100 * expected


def test_lengths_are_expected_as_they_were() -> None:
    lengths = CompletionLengthEstimator()
    assert lengths.estimate([1, 2]) is None
    lengths.record([[1, 2], [3]], [[10, 20], [40, 50]])
    assert (lengths.estimate([1, 2]), lengths.estimate([3]), lengths.estimate([9])) == (15.0, 45.0, 30.0)
    lengths.record([[3]], [[1, 3]])
    assert (lengths.estimate([1, 2]), lengths.estimate([3]), lengths.estimate([9])) == (15.0, 2.0, 2.0)


def test_cores_are_those_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert cores.usable_cores(tmp_path) == 16
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.usable_cores(tmp_path) == 16
    (tmp_path / "cpu.max").write_text("650000 100000\n")
    assert cores.usable_cores(tmp_path) == 6
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cores.usable_cores(tmp_path) == 3
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert [cores.default_workers(n_devices, tmp_path) for n_devices in (0, 1, 2, 8, 16)] == [15, 14, 13, 7, 2]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)), raising=False)
    assert cores.default_workers(8, tmp_path) == 64
