"""What hangs is told with its stacks and ended within the limit: a worker, a rank in a collective, the driver."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from areno import heartbeat
from areno.config.models import MicroBatchSpec
from areno.engine.engine import Engine
from areno.engine.processes import stack_traces, watchdog
from areno.errors import EngineError, WorkerLost
from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.processes import worker_pids
from tests.helpers.tiny_engine import ROLLOUT, model_folder, request, scored, spec
from tests.helpers.waiting import until

LIMIT_S = 1.5
ROWS = [TrainSequence([True, False, False], [3, 4, 5])] * 4
TP_SIZE = {"dp": 1, "tp": 2}
reads_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the state of processes in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers show their stacks, however late they get to it."""
    monkeypatch.setattr(stack_traces, "_ANSWER_S", 60.0)


@contextmanager
def started(folder: Path, workers: str = "spawn", **settings: Any) -> Iterator[Engine]:
    """An engine that has trained once and leaves no process behind."""
    with Engine(spec(folder, **settings), workers) as engine:
        engine.train(ROWS, sft_loss_fn)
        old = [] if workers == "inline" else worker_pids(engine)
        yield engine
    for pid in old:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def be_strict(engine: Engine, limit_s: float = LIMIT_S) -> None:
    engine.workers.watchdog.limit_s = limit_s


def be_strict_when(begun: Path, engine: Engine) -> None:
    """As soon as there is a file: on a busy machine, what is to hang may come late."""

    def wait() -> None:
        until(begun.exists)
        be_strict(engine)

    threading.Thread(target=wait, daemon=True).start()


@reads_proc
@pytest.mark.parametrize("form", ["dp", pytest.param("tp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("busy", ["decoding", pytest.param("train", marks=pytest.mark.slow)])
def test_a_stopped_rank_is_told_and_ended(folder: Path, form: str, busy: str, caplog: Any) -> None:
    with started(folder, devices=2, tp_size=TP_SIZE[form]) as engine:
        if busy == "decoding":
            engine.begin_rollout(ROLLOUT)
            engine.submit([request(i, n_samples=8, max_new_tokens=90, ignore_eos=True) for i in range(40)])
        os.kill(worker_pids(engine)[1], signal.SIGSTOP)
        be_strict(engine)
        with pytest.raises(
            WorkerLost, match=r"worker 1 \(cpu\) made no progress for \d+ s in \w+, since it is stopped \(SIGSTOP\),"
        ):
            engine.train(ROWS, sft_loss_fn) if busy == "train" else wait(engine)
        text = caplog.text
        assert "worker 1 (cpu): no progress for" in text
        assert "it is stopped (SIGSTOP)\n    (a stopped process shows no stack)" in text
        assert "driver:\n    Thread MainThread:" in text
        with pytest.raises(WorkerLost, match="made no progress"):
            scored(engine, "actor", [[3, 4]])
        if form == "dp" and busy == "train":
            engine.restart()
            assert engine.train(ROWS, sft_loss_fn)["skipped_steps"] == 0


def wait(engine: Engine) -> None:
    while True:
        engine.poll(10.0)


@pytest.mark.parametrize("form", ["dp", pytest.param("tp", marks=pytest.mark.slow)])
def test_the_rank_that_others_wait_for_in_a_collective_is_blamed(
    folder: Path, form: str, tmp_path: Path, caplog: Any
) -> None:
    begun = tmp_path / "begun"

    def sleeps_on_rank_1(pack: DataPack, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            begun.touch()
            time.sleep(60)
        return sft_loss_fn(pack, logprobs_N)

    with started(folder, devices=2, tp_size=TP_SIZE[form]) as engine:
        be_strict_when(begun, engine)
        with pytest.raises(WorkerLost, match=r"^worker 1 \(cpu\) made no progress for \d+ s in train and was ended"):
            engine.train(ROWS, sleeps_on_rank_1)
        text = caplog.text
        assert "in sleeps_on_rank_1" in text, "where rank 1 is"
        assert {"dp": "in wait_for", "tp": "in all_reduce"}[form] in text, "where rank 0 is"
        assert "Collective under way: gloo:all_reduce number" in text


def test_a_worker_that_gets_on_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """Each step takes nearly as long as it may, and all together four times that. The time is told, not waited for."""

    def slow(pack: DataPack, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        step = len(list(tmp_path.glob("begun *")))
        (tmp_path / f"begun {step}").touch()
        while not (tmp_path / f"on {step}").exists():
            time.sleep(0.005)
        return sft_loss_fn(pack, logprobs_N)

    with started(folder) as engine, ThreadPoolExecutor(1) as beside:
        be_strict(engine, 1000.0)
        group: Any = engine.workers
        training = beside.submit(engine.train, ROWS, slow, UpdateSpec(MicroBatchSpec(mini_bs=1)))
        try:
            for step in range(4):
                until((tmp_path / f"begun {step}").exists)
                group.watchdog.check(900.0)
                (tmp_path / f"on {step}").touch()
        finally:
            for step in range(4):
                (tmp_path / f"on {step}").touch()
        assert training.result(60)["skipped_steps"] == 0
        until(lambda: not group.heartbeats.is_due(0))
        group.watchdog.check(5000.0)  # with nothing to do
        assert engine.train(ROWS, sft_loss_fn)["skipped_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["sleeping", "computing"])
def test_an_inline_worker_that_hangs_is_interrupted(folder: Path, hangs: str, tmp_path: Path, caplog: Any) -> None:
    begun = tmp_path / "begun"

    def sleeps(*_: Any) -> Any:
        begun.touch()
        time.sleep(60)

    def computes(*_: Any) -> Any:
        begun.touch()
        while True:
            pass

    with started(folder, "inline") as engine:
        be_strict_when(begun, engine)
        with pytest.raises(
            WorkerLost, match=r"^worker 0, which lives in the driver \(train\), made no progress for 1.5 s"
        ):
            engine.train(ROWS, sleeps if hangs == "sleeping" else computes)
        assert ("in sleeps" if hangs == "sleeping" else "in computes") in caplog.text
        engine.restart()
        assert engine.train(ROWS, sft_loss_fn)["skipped_steps"] == 0


@pytest.mark.slow
def test_work_of_the_driver_that_hangs_is_interrupted(folder: Path, caplog: Any) -> None:
    with started(folder, "inline") as engine:
        be_strict(engine)
        engine.workers.watchdog.check(100 * LIMIT_S)  # time outside of work
        with (
            pytest.raises(
                EngineError, match=r"^the driver made no progress for 1.5 s in the run > reward; raise engine"
            ),
            heartbeat.working("the run"),
            heartbeat.working("reward"),
        ):
            threading.Event().wait()
        assert 'test_watchdog.py", line' in caplog.text


@pytest.mark.slow
def test_the_stacks_are_shown_where_c_code_keeps_the_lock_of_the_interpreter(folder: Path, capfd: Any) -> None:
    def keeps_the_lock(pack: DataPack, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        time.sleep(1.2)  # the watchdog looks once a second
        ctypes.PyDLL(None).sleep(6)
        return sft_loss_fn(pack, logprobs_N)

    with started(folder, "inline") as engine:
        be_strict(engine, 2.0)
        engine.train(ROWS, keeps_the_lock)
    assert "in keeps_the_lock" in capfd.readouterr().err


def _armed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timer of faulthandler: the seconds until it shows the stacks, or nothing."""
    armed: list[float] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda s, file: armed.__setitem__(slice(0), [s]))
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", armed.clear)
    return armed


def test_the_stacks_are_not_shown_once_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    armed = _armed(monkeypatch)
    dog = watchdog.Watchdog(None, SimpleNamespace(heartbeats=None, command=""))  # type: ignore[arg-type]
    dog.limit_s = 600.0
    with heartbeat.working("the start"):
        dog.check(1.0)
        assert armed == [602.0]
    dog.check(1.0)
    assert not armed


@pytest.mark.parametrize("ends", ["stopped", "dropped"])
def test_the_stacks_are_not_shown_after_the_watchdog_has_ended(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    armed = _armed(monkeypatch)
    dog: Any = watchdog.Watchdog(0.01, SimpleNamespace(heartbeats=None, command=""))  # type: ignore[arg-type]
    dog.limit_s = 600.0
    [thread] = [thread for thread in threading.enumerate() if thread.name == "areno-watchdog"]
    with heartbeat.working("a run"):
        until(lambda: bool(armed))
        if ends == "stopped":
            dog.stop()
        del dog
        thread.join(30)
    assert not armed


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: Any, folder: Path) -> None:
    now = [0.0]
    looked: list[float] = []

    class Steps(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += 3600.0 if len(looked) == 1 else float(timeout or 0)
            return len(looked) == 3

    class Dog(watchdog.Watchdog):
        def check(self, elapsed: float) -> None:
            looked.append(elapsed)

    dog = Dog(None, None)  # type: ignore[arg-type]
    dog.limit_s = 10.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    watchdog._check_periodically(weakref.ref(dog), Steps())
    assert looked == [1.0, 2.0, 1.0]
