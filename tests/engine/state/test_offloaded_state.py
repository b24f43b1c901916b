"""States of roles whose masters and moments are in host memory, on a CPU that plays the device."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.experiments import SupervisedExperimentConfig
from areno.config.models import OptimizerConfig
from areno.cost.footprint import Footprint, footprint_of
from areno.engine.engine import Engine
from areno.engine.state import checkpointer, storage
from areno.engine.train import optimizer_offload
from areno.engine.train.optimizer_offload import HostBuffer
from areno.errors import EngineError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.ppo import value_loss_fn
from areno.run.resume import changed_settings
from tests.helpers.critics import OPTIMIZER, critic, critic_rows
from tests.helpers.processes import worker_of
from tests.helpers.states import FORMATS, content, same, saved
from tests.helpers.tiny_engine import model_folder, rollout, spec, train_rows
from tests.helpers.waiting import until
from tests.helpers.zero_ranks import state_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def played_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that offloads, with several windows and parts, and blocks of files that begin amid a part."""
    monkeypatch.setattr("areno.engine.roles.has_separate_memory", lambda device: True)
    monkeypatch.setattr(optimizer_offload, "WINDOW", 768)
    monkeypatch.setattr(optimizer_offload, "PART", 1536)
    monkeypatch.setattr(storage, "BLOCK_BYTES", 2000)


def built(folder: Path, offload: bool, optimizer: OptimizerConfig = OPTIMIZER, **settings: Any) -> Engine:
    """Actor and critic."""
    engine = Engine(spec(folder, optimizer=optimizer, offload=offload, **settings), "inline")
    engine.ensure_roles({"critic": critic(folder, optimizer=optimizer, offload=offload)})
    return engine


def step(engine: Engine) -> list[Any]:
    """A step of actor and critic: what was sampled, and all statistics."""
    rows = train_rows(rollout(engine))
    stats = [
        engine.train(rows, partial(grpo_loss_fn, clip_eps=0.2)),
        engine.train(critic_rows(), value_loss_fn, role="critic"),
    ]
    return [[row.tokens for row in rows], *({**of, "memory_gib": 0, "step_train_time_s": 0} for of in stats)]


def buffers(engine: Engine) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, role in worker_of(engine).roles.trained_roles().items():
        with role.on_device():
            found |= {f"{name}.{kind}": tensor for kind, tensor in state_of(role.backend).items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_a_run_may_be_resumed_with_and_without_offload(folder: Path, tmp_path: Path, kind: Any, dtype: str) -> None:
    """All of it is that of the run that went on, to the bit: samples, statistics, weights, masters and moments."""
    optimizer = OptimizerConfig(type=kind, lr=1e-2, lr_scheduler_type="cosine", lr_decay_steps=6)
    with built(folder, False, optimizer, dtype=dtype) as plain:
        first = step(plain)
        stored = content(saved(plain, tmp_path / "plain"))
        expected = step(plain)
        after = buffers(plain)
    with built(folder, True, optimizer, dtype=dtype) as away:
        assert step(away) == first
        assert same(content(saved(away, tmp_path / "away")), stored)
        assert step(away) == expected
        assert same(buffers(away), after)
        for state in ("plain", "away"):
            away.load_state(tmp_path / state)
            assert step(away) == expected
            assert same(buffers(away), after)
    with built(folder, False, optimizer, dtype=dtype) as plain:
        plain.load_state(tmp_path / "away")
        assert step(plain) == expected
        assert same(buffers(plain), after)


def test_what_rests_on_the_device_and_what_does_not(folder: Path) -> None:
    """The actor keeps its weights, the critic nothing. Neither has gradients while it is not trained."""
    with built(folder, True, dtype="bfloat16") as engine:
        step(engine)
        for name, role in worker_of(engine).roles.trained_roles().items():
            flat, optimizer = role.backend.flat, role.backend.optimizer
            assert isinstance(flat.masters, HostBuffer)
            assert all(isinstance(moment, HostBuffer) for moment in optimizer.moments.values())
            sizes = [buffer.untyped_storage().nbytes() > 0 for buffer in (flat.params, flat.grads)]
            assert sizes == [name == "actor", False]


@pytest.mark.slow
def test_the_next_update_waits_for_the_files(folder: Path, tmp_path: Path, slow_disk: threading.Event) -> None:
    """They are written from the buffers that the update changes, and not from a copy."""
    with built(folder, True, dtype="bfloat16") as engine:
        step(engine)
        before = buffers(engine)
        engine.save_state(tmp_path / "state")
        assert not any(name.endswith(("master", "exp_avg", "exp_avg_sq")) for name in worker_of(engine).states._memory)
        rollout(engine)  # does not wait
        assert not engine.is_state_written()
        trained = threading.Event()

        def train() -> None:
            engine.train(critic_rows(), value_loss_fn, role="critic")
            trained.set()

        thread = threading.Thread(target=train)
        thread.start()
        assert not trained.wait(1.0)
        slow_disk.set()
        thread.join(60)
        assert trained.is_set()
        assert engine.is_state_written(wait=True)
        assert not same(buffers(engine), before)
        engine.load_state(tmp_path / "state")
        assert same(buffers(engine), before)


def test_waiting_for_a_disk_that_hangs_is_no_progress(
    folder: Path, tmp_path: Path, slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats of the waiting update come from blocks that are written, so that a watchdog notices a disk that hangs."""
    monkeypatch.setattr(checkpointer, "_WAIT_S", 0.01)
    beats: list[bool] = []
    waits = threading.get_ident()  # only beats of this thread: others may still end what earlier tests have begun

    def beat() -> None:
        if threading.get_ident() == waits:
            beats.append(slow_disk.is_set())

    monkeypatch.setattr(checkpointer.heartbeat, "beat", beat)
    with built(folder, True) as engine:
        engine.save_state(tmp_path / "state")
        states = worker_of(engine).states
        until(lambda: states._n_checks)  # the writer looks at its start, too
        threading.Timer(0.5, slow_disk.set).start()
        beats.clear()
        states._wait_for_files()
        assert beats
        assert all(beats)
        assert engine.is_state_written(wait=True)


@pytest.mark.parametrize("kind", [pytest.param("adam", marks=pytest.mark.slow), "adam_8bit"])
def test_moments_may_be_left_out(folder: Path, tmp_path: Path, kind: Any) -> None:
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    found = []
    for offload in (False, True):
        with built(folder, offload, optimizer) as engine:
            step(engine)
            state = saved(engine, tmp_path / f"state-{offload}")
            engine.load_state(state, False)
            found.append((buffers(engine), step(engine)))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("adam", marks=pytest.mark.slow), "adam_8bit"])
def test_a_state_of_two_tensor_parallel_ranks(
    folder: Path, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8-bit moments are quantised again, into parts."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", 2**24)  # that of the processes that write
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    with Engine(spec(folder, 2, tp_size=2, optimizer=optimizer, dtype="bfloat16")) as two:
        two.ensure_roles({"critic": critic(folder, optimizer=optimizer)})
        step(two)
        state = saved(two, tmp_path / "state")
    loaded = []
    for offload in (False, True):
        with built(folder, offload, optimizer, dtype="bfloat16") as engine:
            engine.load_state(state)
            loaded.append(buffers(engine))
    assert any(tensor.any() for tensor in loaded[0].values())
    assert same(*loaded)


def test_too_little_host_memory_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weight is read."""
    monkeypatch.setattr("areno.engine.device_memory.host_bytes_free", lambda: 2**14)

    def on_a_device(*facts: Any) -> Footprint:
        found = footprint_of(*facts)
        return dataclasses.replace(found, models=tuple(dataclasses.replace(m, offload=True) for m in found.models))

    monkeypatch.setattr("areno.engine.roles.footprint_of", on_a_device)
    wanted = spec(folder, offload=True, random_init=False)  # a folder without weights
    with pytest.raises(EngineError, match=r"^the host memory is too small for actor: .* turn off actor\.offload$"):
        Engine(wanted, "inline")


def test_offload_may_change_within_a_run() -> None:
    before = {"experiment_name": "a", "actor": {"path": "m"}}
    now = {"experiment_name": "a", "actor": {"path": "m", "offload": True}, "enable_offload": True}
    found = {change.key: change.on_resume.kind for change in changed_settings(SupervisedExperimentConfig, before, now)}
    assert found == {"actor.offload": "harmless", "enable_offload": "harmless"}
