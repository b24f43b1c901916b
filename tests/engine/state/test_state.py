"""Run states of one worker: training goes on from one as if nothing had happened; what is wrong with one is told."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.models import OptimizerConfig
from areno.engine.engine import Engine
from areno.engine.state import checkpointer, storage, tensor_shards
from areno.engine.train.learning_rate import learning_rate
from areno.errors import CheckpointError, EngineError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.types import TrainSequence
from tests.helpers.critics import OPTIMIZER, critic, critic_rows, large_shape
from tests.helpers.processes import worker_of
from tests.helpers.states import FORMATS, content, same, saved
from tests.helpers.tiny_engine import model_folder, rollout, saved_tensors, scored, spec, train_rows

NOTHING = [TrainSequence([True, True], [3, 4], [0.0, 0.0], [0.0, 0.0])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def built(folder: Path, optimizer: OptimizerConfig = OPTIMIZER, **settings: Any) -> Engine:
    """Actor and critic."""
    engine = Engine(spec(folder, optimizer=optimizer, **settings))
    engine.ensure_roles({"critic": critic(folder, optimizer=optimizer)})
    return engine


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with built(folder) as built_engine:
        yield built_engine


def steps(engine: Engine, n: int) -> list[Any]:
    """Steps of actor and critic, each on a rollout of its own. What was sampled, and all statistics."""
    seen: list[Any] = []
    for _ in range(n):
        rows = train_rows(rollout(engine))
        stats = [
            engine.train(rows, partial(grpo_loss_fn, clip_eps=0.2)),
            engine.train(critic_rows(), value_loss_fn, role="critic"),
        ]
        seen.append([row.tokens for row in rows])
        seen += [{name: of[name] for name in of.keys() - {"memory_gib", "step_train_time_s"}} for of in stats]
    return seen


def buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """All that a worker in this process keeps of its trained roles, the padding between parameters included."""
    found = {}
    for name, role in worker_of(engine).roles.trained_roles().items():
        optimizer = role.backend.optimizer
        found[f"{name}.params"], found[f"{name}.masters"] = role.backend.flat.params, role.backend.flat.masters
        found |= {f"{name}.{kind}": tensor for kind, tensor in optimizer.moments.items()}
        counters = [optimizer.steps, optimizer.skipped_steps, optimizer.empty_steps]
        found[f"{name}.counters"] = torch.tensor(counters)
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_training_goes_on_as_if_nothing_had_happened(
    folder: Path, tmp_path: Path, kind: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule, too. All is small, so that there are several pieces, parts and blocks, and cut in another way."""
    monkeypatch.setattr(tensor_shards, "MAX_SHARD_ELEMENTS", 300)
    monkeypatch.setattr(checkpointer, "PINNED_BYTES", 2**15)
    monkeypatch.setattr(storage, "BLOCK_BYTES", 2**13)
    optimizer = OptimizerConfig(type=kind, lr=1e-2, lr_scheduler_type="cosine", lr_decay_steps=6)
    with built(folder, optimizer, dtype=dtype) as engine:
        steps(engine, 2)
        assert engine.train(NOTHING, partial(grpo_loss_fn, clip_eps=0.2))["skipped_steps"] == 1
        engine.save_state(tmp_path / "state")
        at_save = buffers(engine)
        expected = steps(engine, 2)
        assert engine.is_state_written(wait=True)
        after = buffers(engine)
    monkeypatch.setattr(tensor_shards, "MAX_SHARD_ELEMENTS", 1000)
    with built(folder, optimizer, dtype=dtype) as other:
        steps(other, 1)  # what it has learned is replaced
        other.load_state(tmp_path / "state")
        assert same(buffers(other), at_save)
        assert other.weights_version == 2
        assert steps(other, 2) == expected
        assert same(buffers(other), after)
    assert at_save["actor.counters"].tolist() == [2, 1, 1]
    assert not same(at_save, after)


def test_updates_without_rows_count_in_the_schedule_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of versions that did not count them are read, too."""
    optimizer = OptimizerConfig(lr=1e-2, lr_scheduler_type="linear", lr_decay_steps=8)
    with built(folder, optimizer) as engine:
        steps(engine, 1)
        before = buffers(engine)
        assert engine.skip_updates("actor", 2) == {"lr": learning_rate(optimizer, 2), "skipped_steps": 2}
        assert engine.weights_version == 1
        after = buffers(engine)
        assert after.pop("actor.counters").tolist() == [1, 2, 2]
        assert same(after, {name: before[name] for name in after})
        saved(engine, tmp_path / "state")
        monkeypatch.setattr(tensor_shards, "N_COUNTERS", 2)
    with built(folder, optimizer) as other:
        other.load_state(tmp_path / "state")
        assert buffers(other)["actor.counters"].tolist() == [1, 2, 0]
        saved(other, tmp_path / "older")
        monkeypatch.undo()
        other.load_state(tmp_path / "state")
        assert buffers(other)["actor.counters"].tolist() == [1, 2, 2]
        assert other.skip_updates("actor", 1)["lr"] == learning_rate(optimizer, 3)
        other.load_state(tmp_path / "older")
        assert buffers(other)["actor.counters"].tolist() == [1, 2, 0]


def test_tensors_are_stored_whole_under_their_checkpoint_names(folder: Path, tmp_path: Path) -> None:
    with built(folder, dtype="bfloat16") as engine:
        steps(engine, 1)
        stored = content(saved(engine, tmp_path / "state"))
        engine.save(str(tmp_path / "model"), "actor")
    weights = saved_tensors(tmp_path / "model")
    masters = {name: tensor for name, tensor in stored.items() if name.startswith("actor.master.")}
    assert masters.keys() == {f"actor.master.{name}" for name in weights}
    for name, weight in weights.items():
        assert torch.equal(stored[f"actor.master.{name}"].bfloat16(), weight)
        assert {stored[f"actor.{kind}.{name}"].shape for kind in ("exp_avg", "exp_avg_sq")} == {weight.shape}
    assert stored["critic.master.score.weight"].any()


@pytest.mark.parametrize(("kind", "most"), [("adam", 12.2), ("adam_bf16", 8.2), ("adam_8bit", 6.3), ("sgd", 4.2)])
def test_a_state_is_small(tmp_path: Path, kind: Any, most: float) -> None:
    """Masters and moments; the weights are not in it a second time."""
    shape = model_folder(tmp_path / "model", vocab_size=10_000)
    with Engine(spec(shape, optimizer=dataclasses.replace(OPTIMIZER, type=kind), dtype="bfloat16")) as engine:
        state = saved(engine, tmp_path / "state")
        assert sum(file.stat().st_size for file in state.iterdir()) / engine.info.n_params < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("adam", "of the state"),
        ("adam_8bit", "when it is loaded"),
        pytest.param("adam", "when it is loaded", marks=pytest.mark.slow),
        pytest.param("adam_8bit", "of the state", marks=pytest.mark.slow),
    ],
)
def test_moments_that_are_left_out_begin_at_zero(folder: Path, tmp_path: Path, kind: Any, left_out: str) -> None:
    """Adam's bias correction begins again with them, and the schedule goes on. Later states know of both."""
    optimizer = dataclasses.replace(OPTIMIZER, type=kind, lr_scheduler_type="linear", lr_decay_steps=8)
    with built(folder, optimizer) as engine:
        steps(engine, 2)
        whole = saved(engine, tmp_path / "whole")
        engine.save_state(tmp_path / "small", with_moments=False)
        assert engine.is_state_written(wait=True)
        at_save = buffers(engine)
    assert not [name for name in content(tmp_path / "small") if "exp_avg" in name]
    with built(folder, optimizer) as other:
        empty = {name: tensor for name, tensor in buffers(other).items() if "exp_avg" in name}
        steps(other, 1)
        other.load_state(*([tmp_path / "small"] if left_out == "of the state" else [whole, False]))
        assert same(buffers(other), at_save | empty)
        worker: Any = other.workers
        of_actor = worker.worker.roles["actor"].backend.optimizer
        assert (of_actor.steps, of_actor.moments_from) == (2, 2)
        before = of_actor.flat.masters.clone()
        rate = optimizer.lr * (0.1 + 0.9 * 6 / 8)
        assert steps(other, 1)[1]["lr"] == pytest.approx(rate)
        moved = (of_actor.flat.masters - before).abs().max()
        assert moved == pytest.approx(rate, rel=0.05), "as a first update, |m / sqrt(v)| = 1"
        later = saved(other, tmp_path / "later")
        at_save, expected = buffers(other), steps(other, 1)
    with built(folder, optimizer) as again:
        again.load_state(later)
        assert same(buffers(again), at_save)
        assert steps(again, 1) == expected, "the bias correction, too"


@pytest.mark.slow
def test_what_is_trained_after_the_call_is_not_in_the_state(
    folder: Path, tmp_path: Path, slow_disk: threading.Event
) -> None:
    with built(folder) as engine:
        steps(engine, 1)
        before = buffers(engine)
        engine.save_state(tmp_path / "state")
        assert not engine.is_state_written()
        with pytest.raises(EngineError, match=r"being written already.*wait=True"):
            engine.save_state(tmp_path / "other")
        steps(engine, 1)
        engine.release_role("critic")
        assert not engine.is_state_written()
        slow_disk.set()
        assert engine.is_state_written(wait=True)
        assert engine.is_state_written()
        assert not (tmp_path / "other").exists()
        only_actor = content(saved(engine, tmp_path / "actor"))
        assert not any(name.startswith("critic") for name in only_actor)
        engine.ensure_roles({"critic": critic(folder)})
        engine.load_state(tmp_path / "state")
        assert same(buffers(engine), before)


@pytest.mark.slow
def test_states_one_after_another(folder: Path, tmp_path: Path) -> None:
    """The second one is planned as the first was, and takes its memory."""
    with built(folder) as engine:
        for number in range(3):
            steps(engine, 1)
            saved(engine, tmp_path / str(number))
        expected = buffers(engine)
        engine.load_state(tmp_path / "0")
        assert engine.weights_version == 1
        engine.load_state(tmp_path / "2")
        assert same(buffers(engine), expected)


def test_closing_drops_what_is_under_way(folder: Path, tmp_path: Path, slow_disk: threading.Event) -> None:
    engine = built(folder)
    engine.save_state(tmp_path / "state")
    closing: threading.Event = worker_of(engine).states._closed
    threading.Thread(target=lambda: closing.wait(60) and slow_disk.set()).start()
    engine.close()
    assert not (tmp_path / "state" / "index.json").exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("areno-state")]


def test_a_state_that_cannot_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once, training goes on, and the next state is written."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "actor.exp_avg.0.bin").symlink_to("/dev/full")
    (tmp_path / "file").touch()
    with built(folder) as engine:
        steps(engine, 1)
        for path, reason in ((full, "No space left on device"), (tmp_path / "file" / "state", "Not a directory")):
            engine.save_state(path)
            with pytest.raises(CheckpointError, match=f"{path}: the state of the run cannot be written: {reason}"):
                engine.is_state_written(wait=True)
            assert engine.is_state_written()
            assert not (path / "index.json").exists()
        engine.release_role("critic")
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer, "host_bytes_free", lambda: 10)
            engine.save_state(tmp_path / "state")
            with pytest.raises(CheckpointError, match="GiB of host memory, which are not free"):
                engine.is_state_written(wait=True)
        expected = buffers(engine)
        saved(engine, tmp_path / "state")
        engine.train(train_rows(rollout(engine)), partial(grpo_loss_fn, clip_eps=0.2))
        engine.load_state(tmp_path / "state")
        assert same(buffers(engine), expected)


@pytest.mark.gpu
def test_the_next_update_waits_for_the_copy_beside_it(tmp_path: Path) -> None:
    """And what rests in host memory is copied as it is. The copy is held up: without the wait, the update is first."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape = large_shape(tmp_path / "shape")
    build = dataclasses.replace(spec(shape, dtype="bfloat16"), devices=["cuda:0"])

    def train(engine: Engine) -> None:
        engine.train(critic_rows(), sft_loss_fn)
        engine.train(critic_rows(), value_loss_fn, role="critic")

    with Engine(build, "inline") as engine:
        engine.ensure_roles({"critic": critic(shape, offload=True)})
        for _ in range(2):  # the second time, nothing is compiled
            train(engine)
            before = content(saved(engine, tmp_path / "before"))
        states: Any = worker_of(engine).states
        with torch.cuda.stream(states._stream):
            torch.cuda._sleep(2 * 10**9)  # clock cycles
        engine.save_state(tmp_path / "state")
        assert states._copied is not None  # nobody has waited for it
        assert not states._copied.query()
        train(engine)
        assert engine.is_state_written(wait=True)
        assert same(content(tmp_path / "state"), before)
        assert not same(content(saved(engine, tmp_path / "after")), before)
        engine.load_state(tmp_path / "state")
        assert same(content(saved(engine, tmp_path / "again")), before)
        rollout(engine)
    with Engine(build) as engine:  # a worker of its own
        engine.ensure_roles({"critic": critic(shape)})
        engine.load_state(tmp_path / "state")
        assert same(content(saved(engine, tmp_path / "other")), before)


# -- states that are not taken over ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps(engine, 1)
    path = saved(engine, tmp_path_factory.mktemp("states") / "state")
    steps(engine, 1)
    return path


def refused(engine: Engine, path: Path, kind: type[Exception], message: str) -> None:
    """With this error, and nothing of it has been taken over."""
    before = buffers(engine)
    with pytest.raises(kind, match=message):
        engine.load_state(path)
    assert same(buffers(engine), before)


FILES = [f"{role}.{kind}.0.bin" for role in ("actor", "critic") for kind in ("master", "exp_avg_sq", "counters")]


@pytest.mark.parametrize("name", [*FILES, "index.json"])
def test_a_damaged_state_is_refused(engine: Engine, state: Path, tmp_path: Path, name: str) -> None:
    damaged = tmp_path / "state"
    shutil.copytree(state, damaged)
    file = damaged / name
    whole = file.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[at] ^= 4
        file.write_bytes(flipped)
        refused(engine, damaged, CheckpointError, rf"{name} (is damaged|has format)")
    for size in (0, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(engine, damaged, CheckpointError, f"{name} (has {size} bytes, expected {len(whole)}|is damaged)")
    file.unlink()
    refused(engine, damaged, CheckpointError, rf"{name} cannot be read \(No such file or directory\)")
    file.write_bytes(whole)
    engine.load_state(damaged)


def test_a_folder_without_a_state(engine: Engine, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        refused(engine, path, CheckpointError, f"{path} is no run state: index.json cannot be read")


def test_a_state_of_another_format(engine: Engine, state: Path, tmp_path: Path) -> None:
    shutil.copytree(state, tmp_path / "state")
    body = b'{"what": "only that version knows"}'
    head = json.dumps({"format": 2, "crc32": zlib.crc32(body)}).encode()
    (tmp_path / "state" / "index.json").write_bytes(head + b"\n" + body)
    refused(engine, tmp_path / "state", CheckpointError, "has format 2, expected 1: another version of areno")


def test_a_state_of_something_else(engine: Engine, state: Path, folder: Path, tmp_path: Path) -> None:
    deeper = model_folder(tmp_path / "deeper")
    values = json.loads((deeper / "config.json").read_text()) | {"num_hidden_layers": 3, "intermediate_size": 80}
    (deeper / "config.json").write_text(json.dumps(values))
    in_8_bits = dataclasses.replace(OPTIMIZER, type="adam_8bit")
    with built(deeper) as other:
        message = (
            r"state: the state is of another model than actor\.path \(.*deeper\): model\.layers\.0\.mlp\.gate_proj\."
            r"weight is \(48, 32\) in the state and \(80, 32\) in the model \(\d+ parameters differ\)"
        )
        refused(other, state, EngineError, message)
        refused(engine, saved(other, tmp_path / "state"), EngineError, r"layers\.0\.mlp\.gate_proj")
    with built(folder, in_8_bits) as other:
        refused(other, state, EngineError, r"actor\.optimizer\.type was 'adam' .* and is 'adam_8bit' now")
    with Engine(spec(folder)) as other:
        refused(other, state, EngineError, "is the state of actor, critic, trained here are actor; ")
    with Engine(spec(folder, optimizer=None)) as other:
        refused(other, state, EngineError, "is the state of actor, critic, trained here are none; ")


def test_a_state_is_not_loaded_amid_a_rollout(engine: Engine, state: Path) -> None:
    from tests.helpers.tiny_engine import ROLLOUT

    engine.begin_rollout(ROLLOUT)
    refused(engine, state, EngineError, "inside a rollout phase; call end_rollout first")
    engine.end_rollout()
    engine.load_state(state)
    assert scored(engine, "actor", [[3, 4]])
