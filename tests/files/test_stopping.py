"""Ctrl-C, SIGTERM and SIGUSR1: what is under way ends or is dropped, a state is written, the run goes on from it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from areno.engine.engine import Engine
from areno.errors import ArenoError
from areno.files import interrupts
from areno.files.interrupts import InterruptDelay, Terminated, raise_terminated
from areno.run.checkpoints import Saver
from areno.run.progress import RunProgress
from areno.scoring.pool import Scoring
from tests import kill_runs
from tests.helpers.resumed import folder_of, go, log, states, whole

RARELY = ["recover.freq_epochs=null"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def kill(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


class Call:
    """Sends a signal at the n-th call of a method."""

    def __init__(self, patch: Any, place: Any, name: str, n: int, number: int = signal.SIGTERM):
        self.calls = 0
        method = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == n:
                kill(number)
            return method(*args, **kwargs)

        patch.setattr(place, name, call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "place", "name", "n", "number", "step"),
    [
        pytest.param("gspo", Engine, "generate", 3, signal.SIGTERM, 1, marks=pytest.mark.slow),  # after an evaluation
        ("gspo", Scoring, "collect_outcomes", 3, signal.SIGINT, 1),
        pytest.param("gspo", Engine, "generate", 4, signal.SIGTERM, 2, marks=pytest.mark.slow),  # in an evaluation
        pytest.param("gspo", Engine, "train", 3, signal.SIGUSR1, 3, marks=pytest.mark.slow),  # the update is finished
        ("gspo", Saver, "save", 1, signal.SIGTERM, 3),
        pytest.param("ppo", Engine, "values", 2, signal.SIGTERM, 1, marks=pytest.mark.slow),
        # The critic's; the policy's comes after it.
        pytest.param("ppo", Engine, "train", 3, signal.SIGINT, 3, marks=pytest.mark.slow),
        pytest.param("dpo", Engine, "train", 2, signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_state_of_the_last_step(
    recipe, place, name, n, number, step, work, tmp_path, tmp_path_factory, capfd
):
    work.setattr(interrupts, "LIMIT_S", 200.0)  # however long the step takes here
    settings = ["rollout.dynamic_sampling=false"] if recipe == "gspo" else []
    kill_runs.write_rows(recipe, tmp_path)
    with work.context() as patch:
        Call(patch, place, name, n, number)
        assert go(recipe, *RARELY, *settings) == CODES[number]
    assert states() == [f"step-{step:06d}"]
    said = capfd.readouterr().err
    assert f"to resume it: python -m areno.recipes.{recipe} --resume outputs/" in said
    assert f"the run can go on after step {step}: --resume {folder_of(recipe)}" in log()
    assert go(recipe, *RARELY, *settings) == 0
    expected = whole(recipe, tmp_path_factory, *settings)
    assert kill_runs.differences(expected, kill_runs.left_by(folder_of(recipe))) == []


def test_before_the_first_step(work, tmp_path, capfd):
    kill_runs.write_rows("dpo", tmp_path)
    with work.context() as patch:
        Call(patch, Engine, "logprobs", 2)  # of the reference
        assert go("dpo", *RARELY) == 143
    assert states() == []
    assert "to resume it" not in capfd.readouterr().err
    assert go("dpo", "total_train_steps=1") == 0


def test_an_update_that_takes_too_long(work, tmp_path):
    """The last state counts then, and it is said that the step is lost."""
    kill_runs.write_rows("sft", tmp_path)
    train = Engine.train
    calls = []

    def slow(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            work.setattr(interrupts, "LIMIT_S", 0.2)
            kill()
            time.sleep(60)
        return train(self, *args, **kwargs)

    work.setattr(Engine, "train", slow)
    assert go("sft", "recover.freq_steps=1") == 143
    assert states()[-1] in ("step-000001", "step-000002")  # one at a time is written
    assert "warning: the models were being trained in step 3, so it is lost" in log()


@pytest.mark.slow
def test_an_error_leaves_a_state_too(work, tmp_path, tmp_path_factory):
    kill_runs.write_rows("sft", tmp_path)
    next_batch = RunProgress.next_batch

    def fail(progress):
        if progress.step == 3:
            raise ArenoError("what nobody foresaw")
        return next_batch(progress)

    with work.context() as patch:
        patch.setattr(RunProgress, "next_batch", fail)
        assert go("sft", *RARELY) == 1
    assert states() == ["step-000003"]
    assert go("sft", *RARELY) == 0
    assert kill_runs.differences(whole("sft", tmp_path_factory), kill_runs.left_by(folder_of("sft"))) == []


# The signals themselves ----------------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in CODES}
    signal.signal(signal.SIGTERM, raise_terminated)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_waits_and_the_second_does_not(handlers, capfd):
    with InterruptDelay() as stop:
        stop.raise_if_interrupted()
        kill()
        assert b"stopping as soon as" in capfd.readouterr().err.encode()
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is raise_terminated


def test_a_signal_is_taken_where_it_is_asked_for(handlers):
    with InterruptDelay() as stop:
        kill()
        with pytest.raises(Terminated):
            stop.raise_if_interrupted()
        stop.raise_if_interrupted()  # once is enough


def test_a_signal_ends_work_that_may_be_dropped(handlers):
    with InterruptDelay() as stop, pytest.raises(Terminated), stop.interruptible():
        kill()
    with InterruptDelay() as stop:
        kill()
        with pytest.raises(Terminated), stop.interruptible():
            pytest.fail("it had been asked to stop")


def test_a_signal_waits_no_longer_than_its_limit(handlers, monkeypatch):
    monkeypatch.setattr(interrupts, "LIMIT_S", 0.05)

    def wait():  # the second signal may come at any moment
        kill()
        time.sleep(30)

    with InterruptDelay(), pytest.raises(Terminated):
        wait()


def test_handlers_of_the_program_stay(handlers):
    came = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    with InterruptDelay():
        kill()
    assert came == [signal.SIGTERM]


def test_another_thread_has_no_signals():
    def work():
        with InterruptDelay() as stop:
            stop.raise_if_interrupted()
        done.append(True)

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
