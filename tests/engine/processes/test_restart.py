"""A lost worker is told as such, and the engine can be started again in place."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.models import OptimizerConfig
from areno.engine.engine import Engine
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.processes.worker_main import _error_to_send
from areno.errors import CheckpointError, EngineError, WorkerLost
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from tests.helpers.processes import worker_pids
from tests.helpers.tiny_engine import (
    MIXED,
    ROLLOUT,
    finish,
    model_folder,
    request,
    rollout,
    scored,
    spec,
    train_rows,
    values,
)

ROWS = [[3, 4, 5, 6], [7, 8]]
ENDLESS = 20_000  # tokens: a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), context=ENDLESS + 100)


def roles(folder: Path) -> dict[str, RoleSpec]:
    return {
        "ref": RoleSpec(path=str(folder), head="lm", key="ref.path"),
        "critic": RoleSpec(path=str(folder), head="value", key="critic.path", optimizer=OptimizerConfig(lr=1e-2)),
    }


def seen(engine: Engine) -> list[Any]:
    """What the models say, and what is sampled."""
    sampled = {
        request_id: [(output.tokens, output.logprobs) for output in outputs]
        for request_id, outputs in rollout(engine).items()
    }
    return [scored(engine, "actor", ROWS), scored(engine, "ref", ROWS), values(engine, "critic", ROWS), sampled]


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param({}, id="one"),
        pytest.param({"devices": 2}, id="dp", marks=pytest.mark.slow),
        pytest.param({"devices": 2, "tp_size": 2}, id="tp", marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_lost_a_worker_starts_again_as_freshly_loaded(folder: Path, devices: dict[str, int]) -> None:
    with Engine(spec(folder, **devices), "spawn") as engine:
        engine.ensure_roles(roles(folder))
        before, old = seen(engine), worker_pids(engine)
        engine.train(train_rows(rollout(engine)), sft_loss_fn)
        assert engine.weights_version == 1
        engine.begin_rollout(ROLLOUT)
        engine.submit(MIXED)
        os.kill(worker_pids(engine)[-1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"worker \d \(cpu\) was killed by SIGKILL, perhaps by the kernel"):
            finish(engine, 99)
        engine.restart()
        assert not set(old) & set(worker_pids(engine))
        for pid in old:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(EngineError, match="outside a rollout phase"):
            engine.submit([request(0)])
        assert engine.weights_version == 0
        assert seen(engine) == before
        with pytest.raises(EngineError, match="is loaded already, asked for now with"):
            engine.ensure_roles({"ref": roles(folder)["critic"]})


def test_streams_end_when_the_workers_start_again(folder: Path) -> None:
    async def main(engine: Engine) -> list[Any]:
        long = [request(100 + i, max_new_tokens=ENDLESS, ignore_eos=True, length=40) for i in range(3)]
        tasks = [asyncio.create_task(all_of(engine, each)) for each in long]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.restart)
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def all_of(engine: Engine, each: Any) -> int:
        return len([output async for output in engine.generate_stream(each)])

    with Engine(spec(folder)) as engine:
        expected = rollout(engine)
        engine.train(train_rows(expected), sft_loss_fn)
        engine.begin_rollout(RolloutSpec(max_running=3, max_len=ENDLESS + 100))
        ends = asyncio.run(main(engine))
        assert [type(end) for end in ends] == [EngineError] * 3
        assert "every request under way is lost" in str(ends[0])
        assert engine.weights_version == 0
        assert rollout(engine) == expected


def lost_again(*_: Any, **__: Any) -> Any:
    raise WorkerLost("once more")


def test_a_state_under_way_is_lost_with_the_workers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(spec(folder)) as engine:
        engine.save_state(tmp_path / "first")
        with monkeypatch.context() as patch:
            patch.setattr("areno.engine.engine.start_workers", lost_again)
            with pytest.raises(WorkerLost, match="once more"):
                engine.restart()
        engine.restart()
        with pytest.raises(CheckpointError, match="the run state was not written: the workers were lost"):
            engine.is_state_written()
        engine.save_state(tmp_path / "second")
        assert engine.is_state_written(wait=True)
        engine.restart()
        assert engine.is_state_written()
        engine.load_state(tmp_path / "second")


def test_an_error_of_the_device_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    context = ParallelContext(3, torch.device("cuda:3"), *[ParallelGroup()] * 4)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not isinstance(_error_to_send(error, context), WorkerLost)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    lost = pickle.loads(pickle.dumps(_error_to_send(error, context)))
    assert isinstance(lost, WorkerLost)
    assert str(lost).startswith("worker 3 lost its device (cuda:3): worker 3 failed: RuntimeError: CUDA error: an ill")
    assert not isinstance(_error_to_send(EngineError("out of device memory"), context), WorkerLost)
