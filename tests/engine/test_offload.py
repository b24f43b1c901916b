"""Roles that rest in host memory: what is away takes no device memory, and what returns is what left."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import SamplingConfig
from areno.engine.engine import Engine
from areno.engine.roles import OffloadedBuffers, _offloaded_buffers
from areno.engine.train import optimizer_offload
from areno.engine.train.backend import TrainBackend
from areno.engine.train.optimizer_offload import HostBuffer
from areno.errors import EngineError
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.models import weights
from areno.models.registry import build_model, load_config
from areno.specs.rollout import RolloutSpec
from tests.helpers.critics import OPTIMIZER, ROWS, critic, critic_rows, large_shape, reference
from tests.helpers.processes import worker_of
from tests.helpers.states import content, same, saved
from tests.helpers.tiny_engine import VOCAB, request, rollout, scored, spec, train_on, train_rows, values
from tests.helpers.train_backend import ALONE, train_backend
from tests.helpers.zero_ranks import backend, state_of
from tests.helpers.zero_ranks import rows as zero_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [100, 2**28])
def test_buffers_that_come_and_go_change_nothing(
    folder: Path, dtype: torch.dtype, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU in the part of the device: what is away has no memory, what returns is what left."""
    monkeypatch.setattr("areno.engine.roles.PINNED_BYTES", chunk_bytes)
    backends = []
    for away in (False, True):
        model = build_model(load_config(folder, "value"), dtype=dtype, device="cpu")
        weights.load_weights(model, folder)
        backends.append(train_backend(model, OPTIMIZER, offload=away))
    plain, moved = backends
    offload = _offloaded_buffers(moved, keeps_weights=False)
    assert moved.flat is not None
    assert moved.optimizer is not None
    buffers = [moved.flat.params, moved.flat.grads]

    def at_home() -> list[bool]:
        return [buffer.untyped_storage().nbytes() > 0 for buffer in buffers]

    spec = MicroBatchSpec(mini_bs=3)
    for _ in range(3):
        assert at_home() == [False, False]
        expected = train_on(plain, critic_rows(), value_loss_fn, spec)
        with offload.on_device(training=True):
            assert at_home() == [True, True]
            assert train_on(moved, critic_rows(), value_loss_fn, spec) == expected
        with offload.on_device():
            assert at_home() == [True, False]
            assert [row.tolist() for row in moved.values(ROWS, spec)] == [
                row.tolist() for row in plain.values(ROWS, spec)
            ]
    assert any(value for row in plain.values(ROWS, spec) for value in row)
    with pytest.raises(ValueError, match="amid"), offload.on_device(training=True):
        raise ValueError("amid")
    assert at_home() == [False, False]
    with offload.on_device(training=True):
        assert torch.equal(moved.flat.params, plain.flat.params)  # type: ignore[union-attr]
        assert_same_state(moved, plain)


def assert_same_state(one: TrainBackend, other: TrainBackend) -> None:
    found, expected = state_of(one), state_of(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


def test_an_actor_keeps_its_weights_and_scores_without_gradients(folder: Path) -> None:
    """The LM head's gradient is a view of memory that is freed while the model scores."""
    plain, moved = (backend(folder, 0, ALONE, torch.bfloat16, offload=away) for away in (False, True))
    offload = _offloaded_buffers(moved, keeps_weights=True)
    assert moved.flat is not None
    rows = [np.array(row) for row in ROWS]
    spec = MicroBatchSpec(mini_bs=3)
    for _ in range(2):
        with offload.on_device(training=True):
            found = train_on(moved, zero_rows(), sft_loss_fn, spec)
        assert found == train_on(plain, zero_rows(), sft_loss_fn, spec)
        assert moved.flat.params.untyped_storage().nbytes() > 0 == moved.flat.grads.untyped_storage().nbytes()
        with offload.on_device():
            scored_rows = moved.logprobs(rows, SamplingConfig(), spec)
        for one, other in zip(scored_rows, plain.logprobs(rows, SamplingConfig(), spec), strict=True):
            assert one.tolist() == other.tolist()
    assert_same_state(moved, plain)


def test_a_cache_that_stays_leaves_room_for_gradients(folder: Path) -> None:
    """A cache that is dropped after the rollout may take the memory of gradients."""
    with Engine(spec(folder), "inline") as engine:
        worker = worker_of(engine)
        found = worker.roles.footprint
        away = tuple(dataclasses.replace(model, offload=True) for model in found.models)
        worker.roles.footprint = dataclasses.replace(found, models=away)
        extra = worker.roles.footprint.max_extra_bytes_in_use
        assert extra > 4 * engine.info.n_params
        rollout_spec = RolloutSpec(max_running=4, max_len=64)
        worker.decoders.free_bytes = lambda: extra + 1000
        with pytest.raises(EngineError, match=r"or set rollout\.drop_rollout_state=true"):
            engine.begin_rollout(rollout_spec)
        worker.decoders.free_bytes = lambda: extra + 2**24
        kept = engine.begin_rollout(rollout_spec).cache_tokens
        worker.decoders.free_bytes = lambda: 2**24
        dropped = engine.begin_rollout(dataclasses.replace(rollout_spec, keeps_cache=False)).cache_tokens
        assert kept == dropped > 0
        engine.end_rollout(drop=True)


def test_what_had_come_leaves_again_where_the_rest_finds_no_room() -> None:
    params, scratch = torch.arange(10.0), torch.arange(5.0)
    offload = OffloadedBuffers([params], [scratch])
    arrive = offload._scratch[0].copy_to_device
    offload._scratch[0].copy_to_device = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError), offload.on_device(training=True):
        pass
    assert (params.untyped_storage().nbytes(), scratch.untyped_storage().nbytes()) == (0, 0)
    offload._scratch[0].copy_to_device = arrive  # type: ignore[method-assign]
    with offload.on_device(training=True):
        assert (params.tolist(), scratch.untyped_storage().nbytes()) == ([*range(10)], 20)


SLOW_OPTIMIZER = OptimizerConfig(lr=1e-3, lr_scheduler_type="constant", warmup_steps_proportion=0.0)


@pytest.mark.gpu
def test_offloaded_roles_leave_the_device_and_keep_their_results(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from areno.engine.processes.process_groups import join_groups
    from areno.engine.train.checked_rows import read_rows
    from areno.engine.train.micro_batches import divide_steps
    from areno.engine.worker import Worker
    from areno.specs.update import UpdateSpec

    shape = large_shape(tmp_path / "shape")
    build = dataclasses.replace(spec(shape, dtype="bfloat16"), devices=["cuda:0"])
    mb_spec = MicroBatchSpec(mini_bs=3)
    update, token_rows = UpdateSpec(mb_spec), [np.array(row) for row in ROWS]
    [steps] = divide_steps(read_rows(critic_rows(), VOCAB), update)
    losses: list[list[float]] = []
    scores: list[list[float]] = []
    for offload in (False, True):
        worker = Worker(build, join_groups(build, 0))
        worker.train("actor", steps, sft_loss_fn, update)  # libraries take their working memory
        n_params = sum(p.numel() for p in worker.actor.parameters())
        gc.collect()
        before = torch.cuda.memory_allocated()
        worker.load_role("critic", critic(shape, offload=offload, optimizer=SLOW_OPTIMIZER))
        worker.load_role("ref", reference(shape, offload=offload))
        # Critic: bf16 weights, fp32 masters, gradients, two moments; reference: bf16 weights.
        kept = torch.cuda.memory_allocated() - before
        assert (kept < 0.05 * n_params) if offload else (kept >= 20 * n_params), (kept, n_params)
        losses.append([])
        scores.append([])
        for _ in range(3):
            losses[-1].append(worker.train("critic", steps, value_loss_fn, update).stats["loss"])
            scored_rows, _ = worker.score("critic", "values", token_rows, {"mb_spec": mb_spec})
            more, _ = worker.score("ref", "logprobs", token_rows, {"mb_spec": mb_spec, "sampling": SamplingConfig()})
            for row in scored_rows + more:
                scores[-1] += row.tolist()
        assert abs(torch.cuda.memory_allocated() - before - kept) < 0.2 * n_params
        worker.save(str(tmp_path / f"critic-{offload}"), "critic")
        for name in ("critic", "ref"):
            worker.release_role(name)
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 0.2 * n_params
        del worker
    assert len(set(losses[0])) == 3
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)  # sums on a GPU may differ in order
    assert scores[1] == pytest.approx(scores[0], abs=3e-2)
    saved = [
        transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / f"critic-{offload}", dtype=torch.float32
        )
        for offload in (False, True)
    ]
    for one, other in zip(saved[0].parameters(), saved[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=1e-2)
    assert saved[1].score.weight.abs().sum() > 0


@pytest.mark.gpu
def test_offloaded_roles_beside_a_decoder(tmp_path: Path) -> None:
    """Rollouts between uses may take the memory that the roles left, and what returns is what left."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape = large_shape(tmp_path / "shape")
    build = dataclasses.replace(spec(shape, dtype="bfloat16"), devices=["cuda:0"])
    results = []
    for offload in (False, True):
        wanted = critic(shape, offload=offload, optimizer=SLOW_OPTIMIZER)
        with Engine(build) as engine:
            engine.ensure_roles({"critic": wanted, "ref": reference(shape, offload=offload)})
            numbers: list[float] = []
            for _ in range(2):
                rollout(engine)
                numbers += [value for row in scored(engine, "ref", ROWS) for value in row]
                numbers.append(engine.train(critic_rows(), value_loss_fn, role="critic")["loss"])
                numbers += engine.rewards("critic", ROWS)
            engine.release_role("critic")
            engine.ensure_roles({"critic": wanted})
            assert values(engine, "critic", ROWS) == [[0.0] * len(row) for row in ROWS]
            results.append(numbers)
    assert results[1] == pytest.approx(results[0], abs=3e-2)


def on_gpu(folder: Path, kind: str, dtype: torch.dtype, in_host: bool) -> TrainBackend:
    model = build_model(load_config(folder), dtype=dtype, device="cuda:0")
    model.init_weights(3)
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    return train_backend(model, optimizer, offload=in_host)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "adam_8bit", "muon", "sgd"])
def test_updates_on_a_gpu_are_those_without_offload(
    tmp_path: Path, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with many windows of which each passes through one of three places in device memory."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(optimizer_offload, "WINDOW", 2**18)
    monkeypatch.setattr(optimizer_offload, "PART", 2**20)
    shape = large_shape(tmp_path)
    plain, in_host = (on_gpu(shape, kind, dtype, away) for away in (False, True))
    for each in (plain, in_host):
        assert each.flat is not None
        assert each.optimizer is not None
        drawn = torch.Generator("cuda:0").manual_seed(5)
        for _ in range(4):
            each.flat.grads.normal_(generator=drawn)
            each.optimizer.step(1.0)  # the host waits for nothing between updates
    torch.cuda.synchronize()
    assert_same_state(in_host, plain)
    moments = in_host.optimizer.moments.values()  # type: ignore[union-attr]
    parts = [part for moment in moments if isinstance(moment, HostBuffer) for part in moment.parts]
    assert (kind == "sgd") == (not parts)
    assert all(part.is_pinned() for part in parts)
    masters = in_host.flat.masters  # type: ignore[union-attr]
    if dtype == torch.bfloat16:
        assert isinstance(masters, HostBuffer)
        in_host.flat.params.zero_()  # type: ignore[union-attr]
        in_host.flat.update_from_masters()  # type: ignore[union-attr]
        assert torch.equal(in_host.flat.params, plain.flat.params)  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "adam_8bit"])
def test_an_offloaded_actor_trains_as_one_on_the_device(tmp_path: Path, kind: Any) -> None:
    """Rollouts, updates and states are equal to the bit, and a rollout finds the memory of all but the weights."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape = large_shape(tmp_path / "shape")
    optimizer = dataclasses.replace(SLOW_OPTIMIZER, type=kind)
    found: list[list[Any]] = []
    peaks: list[float] = []
    for offload in (False, True):
        build = spec(shape, ["cuda:0"], dtype="bfloat16", deterministic=True, optimizer=optimizer, offload=offload)
        seen: list[Any] = []

        def step(engine: Engine, seen: list[Any] = seen) -> None:
            rows = train_rows(rollout(engine))
            stats = engine.train(rows, sft_loss_fn)
            seen.append(([row.tokens for row in rows], stats["loss"], stats["grad_norm"]))

        with Engine(build, "spawn") as engine:
            step(engine)
            step(engine)
            middle = saved(engine, tmp_path / f"middle-{offload}")
            step(engine)
            engine.peak_memory_gib()  # resets the peak
            rollout(engine)
            peaks.append(engine.peak_memory_gib() * 2**30 / engine.info.n_params)
            after = content(saved(engine, tmp_path / f"after-{offload}"))
            engine.load_state(tmp_path / "middle-False")
            assert same(content(tmp_path / "middle-False"), content(middle))
            step(engine)
            assert seen[-1] == seen[-2]
            assert same(content(saved(engine, tmp_path / f"again-{offload}")), after)
        found.append(seen)
    assert found[0] == found[1]
    assert same(content(tmp_path / "after-False"), content(tmp_path / "after-True"))
    in_host_memory = 4 + 4 + (8 if kind == "adam" else 2)  # masters, moments, and gradients, which are freed
    assert peaks[0] - peaks[1] > 0.9 * in_host_memory, peaks


@pytest.mark.gpu
def test_what_a_rollout_held_is_free_when_it_is_dropped(tmp_path: Path) -> None:
    """At once, and not when Python happens to look for circles of references: training needs the memory now."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape = large_shape(tmp_path / "shape")
    build = dataclasses.replace(spec(shape, dtype="bfloat16"), devices=["cuda:0"])
    with Engine(build, "inline") as engine:
        before = torch.cuda.memory_allocated()
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):  # the first one compiles kernels
                engine.begin_rollout(RolloutSpec(max_running=2048, max_len=512))
                engine.generate([request(0, n_samples=4)])
                held = torch.cuda.memory_allocated() - before
                engine.end_rollout(drop=True)
                # What stays are the workspaces of libraries.
                assert torch.cuda.memory_allocated() - before < 2**28
            assert held > 2**29
        finally:
            gc.enable()
