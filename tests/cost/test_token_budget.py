"""The number of tokens in a micro-batch that the engine chooses, and what it does when memory runs out."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import SamplingConfig
from areno.cost.footprint import Footprint, ModelFootprint
from areno.cost.memory import LOGITS_CHUNK, PassBytes
from areno.cost.token_budget import SCORE, TRAIN, choose_token_budget
from areno.engine.engine import Engine
from areno.engine.train.recomputation import RecomputationPolicy
from areno.engine.worker import Worker
from areno.kernels.logprobs import FUSED_CHUNK
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.update import UpdateSpec
from tests.helpers.critics import critic, critic_rows, reference
from tests.helpers.fused_layers import DELTA
from tests.helpers.large_shapes import ACTOR, CRITIC, QWEN3_06B, QWEN3_8B, REF
from tests.helpers.tiny_backend import WHOLE, loss_and_gradient, make, make_rows
from tests.helpers.tiny_engine import ROLLOUT, model_folder, rollout, spec, train_on, train_rows

H100 = 80 * 2**30
SMALL = replace(QWEN3_06B, hidden_size=512, intermediate_size=1536, num_layers=6, num_heads=8, vocab_size=8192)


def budget(
    model: ModelFootprint, phase: str = TRAIN, *others: ModelFootprint, device: int = H100, cache: int = 0, **more: Any
) -> int:
    footprint = Footprint(models=(model, *others), itemsize=2, **more)
    return choose_token_budget(footprint, model, phase, device, cache)


# -- the memory of a pass ----------------------------------------------------------------------------------------------


def test_the_chunk_of_logits_is_that_of_the_kernel() -> None:
    assert LOGITS_CHUNK == FUSED_CHUNK


@pytest.mark.parametrize(
    "need",
    [
        PassBytes(of_token=90, at_work=10, of_kept_layer=10),
        PassBytes(of_token=100_000, logits_of_token=900_000, stored_of_token=300_000),
        PassBytes(of_token=1000, logits_of_token=60_000_000, stored_of_token=90_000_000),
        PassBytes.for_training(QWEN3_8B, 2),
        PassBytes.for_training(QWEN3_8B, 2).offloading(36, 36),
        PassBytes.for_scoring(QWEN3_8B, 2),
    ],
)
def test_the_largest_micro_batch_that_fits(need: PassBytes) -> None:
    for room in (0, 2**24, 2**30, 3 * 2**30, 2**33, 2**37):
        n = need.fitting_tokens(room)
        assert n == 0 or need.total(n) <= room
        assert need.total(n + 1) > room


def test_layers_that_keep_their_products_fill_the_room() -> None:
    need = PassBytes.for_training(QWEN3_8B, 2)
    for n_tokens, room in itertools.product((512, 4096), (2**32, 2**34)):
        n = need.fitting_layers(n_tokens, room, 36)
        assert n == 0 or need.total(n_tokens, n) <= room
        assert n == 36 or need.total(n_tokens, n + 1) > room


def test_as_few_layers_as_necessary_have_their_inputs_in_host_memory() -> None:
    need = PassBytes.for_training(QWEN3_8B, 2)
    for n_tokens, room in itertools.product((8192, 65536, 131072), (2**33, 2**34, 2**35, 2**36)):
        n = need.layers_to_offload(n_tokens, room, 36)
        assert (n == 0) == (need.total(n_tokens) <= room)
        if n:
            assert n == 35 or need.offloading(36, n).total(n_tokens) <= room
            assert n == 1 or need.offloading(36, n - 1).total(n_tokens) > room
    assert PassBytes.for_training(QWEN3_8B, 2, recompute=False).layers_to_offload(65536, 0, 36) == 0


def test_a_row_of_128k_tokens_of_an_8b_model_with_adapters_fits_80_gb() -> None:
    """Worked by hand: a token takes 4 D bytes of the residual stream and 2 D of the output of attention in a layer."""
    need = PassBytes.for_training(QWEN3_8B, 2)
    assert need.of_inputs == 6 * 4096
    room = 55 * 2**30  # of 80 GB without a reserve, weights and adapters
    assert need.fitting_tokens(room) < 2**15
    assert need.offloading(36, 35).fitting_tokens(room) > 2**17
    assert 24 < need.layers_to_offload(2**17, room, 36) < 32
    # Tokens beyond a piece of the MLP take less.
    at_once = [need.total(n) for n in (30_000, 2**15, 2**16 - 30_000)]
    assert at_once[1] - at_once[0] > at_once[2] - at_once[1] > 0


# -- the choice --------------------------------------------------------------------------------------------------------


def test_small_models_get_large_micro_batches_and_large_models_what_fits() -> None:
    small, medium = replace(ACTOR, config=SMALL), replace(ACTOR, config=QWEN3_06B)
    large = replace(ACTOR, optimizer=OptimizerConfig(type="adam_8bit"))
    assert budget(small) == 131072
    assert 16384 <= budget(medium) <= 131072
    footprint = Footprint(models=(large,), itemsize=2)
    assert 256 < budget(large, device=141 * 2**30) < budget(medium)
    assert (
        footprint.total_resident_bytes + footprint.training_bytes(large, budget(large, device=141 * 2**30))
        < 0.94 * 141 * 2**30
    )


def test_micro_batches_with_shared_prefixes_may_be_twice_as_large() -> None:
    shared = {"share_prefixes": True}
    for model in (replace(ACTOR, config=QWEN3_06B), replace(ACTOR, optimizer=OptimizerConfig(type="adam_8bit"))):
        alone, larger = (budget(model, device=200 * 2**30, **more) for more in ({}, shared))
        assert alone < larger <= 2 * alone
    recurrent = replace(ACTOR, config=replace(QWEN3_06B, delta=DELTA))
    assert budget(recurrent) == budget(recurrent, **shared)


def test_memory_that_is_taken_makes_micro_batches_smaller() -> None:
    model = replace(ACTOR, config=QWEN3_06B)
    other = replace(REF, config=QWEN3_06B)
    device = 16 * 2**30
    alone = budget(model, device=device)
    assert budget(model, device=device, cache=3 * 2**30) < alone
    assert budget(model, TRAIN, other, device=device) <= alone
    critic_too = replace(CRITIC, config=replace(QWEN3_06B, head="value"))
    resting = replace(critic_too, offload=True)
    beside = budget(critic_too, TRAIN, model, device=24 * 2**30)
    # While it is trained, its weights and gradients are on the device, and a part of its masters and moments.
    bare = replace(critic_too, optimizer=OptimizerConfig(type="sgd"))
    assert beside < budget(resting, TRAIN, model, device=24 * 2**30)
    assert budget(resting, TRAIN, model, device=24 * 2**30) <= budget(bare, TRAIN, model, device=27 * 2**30)
    scores = budget(resting, SCORE, model, device=12 * 2**30)
    assert scores == budget(replace(critic_too, optimizer=None), SCORE, model, device=12 * 2**30)
    assert budget(model, TRAIN, resting, device=24 * 2**30) > budget(model, TRAIN, critic_too, device=24 * 2**30)


def test_scoring_has_room_for_more_tokens_and_a_full_device_still_gets_a_size() -> None:
    large = replace(ACTOR, optimizer=OptimizerConfig(type="adam_8bit"))
    assert budget(large, SCORE, device=121 * 2**30) > budget(large, TRAIN, device=121 * 2**30)
    assert budget(large, device=2**30) == 256


def test_a_cpu_gets_micro_batches_of_128_mib() -> None:
    model = replace(ACTOR, config=SMALL)
    n = budget(model, device=2**34, on_cuda=False)
    need = PassBytes.for_training(SMALL, 2)
    of_token = need.of_token + need.at_work
    assert n * of_token <= 2**27 < 2 * n * of_token
    assert budget(ACTOR, device=2**40, on_cuda=False) == 512


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    with Engine(spec(model_folder(tmp_path / "model"))) as engine:
        yield engine


def test_results_are_those_of_any_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, found = model_folder(tmp_path / "model"), []
    for size in (MicroBatchSpec(), MicroBatchSpec(mini_bs=2)):
        with Engine(spec(folder, mb_spec=size)) as engine, caplog.at_level(logging.INFO, "areno"):
            engine.ensure_roles({"ref": reference(folder), "critic": critic(folder)})
            rows = train_rows(rollout(engine))
            tokens = [row.tokens for row in rows]
            engine.train(critic_rows(), sft_like_value_loss, role="critic")
            stats = engine.train(rows, grpo_loss_fn)
            found.append((stats["loss"], stats["grad_norm"], *map(float, engine.logprobs("ref", tokens)[0][-3:])))
            values = engine.values("critic", tokens)
            assert engine.token_budgets["tokens"] == ({} if size.mini_bs else engine._budgets.tokens)
            assert len(values) == len(tokens)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    lines = [record.message for record in caplog.records if "micro-batches, in tokens" in record.message]
    assert len(lines) == 1
    for part in ("actor ", "; ref ", "; critic ", " (train), ", " (score)"):
        assert part in lines[0]


def sft_like_value_loss(pack: Any, values: torch.Tensor) -> Any:
    loss = pack.token_mean(pack.trained(values) ** 2)
    return loss, {"seen": loss.detach()}


def test_the_choice_is_logged_once_and_does_not_change(engine: Engine) -> None:
    rows = train_rows(rollout(engine))
    engine.train(rows, grpo_loss_fn)
    first = engine.token_budgets
    for _ in range(2):
        engine.train(train_rows(rollout(engine)), grpo_loss_fn)
    assert engine.token_budgets == first
    # A KV cache of another size is taken into account, and a budget never rises.
    engine.begin_rollout(replace(ROLLOUT, max_running=2))
    engine.end_rollout(drop=True)
    engine.train(train_rows(rollout(engine)), grpo_loss_fn)
    assert all(
        engine.token_budgets["tokens"]["actor"][phase] <= first["tokens"]["actor"][phase] for phase in ("train",)
    )


def test_counted_micro_batches_have_16_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[UpdateSpec] = []
    train = Worker.train

    def see(self: Worker, role: str, steps: Any, loss_fn: Any, update: UpdateSpec) -> Any:
        seen.append(update)
        return train(self, role, steps, loss_fn, update)

    monkeypatch.setattr(Worker, "train", see)
    rows = train_rows(rollout(engine))
    engine.train(rows, sft_loss_fn, UpdateSpec(MicroBatchSpec(), gradient_accumulation_steps=2))
    assert seen[0].mb_spec == MicroBatchSpec(mini_bs=16)
    assert not seen[0].may_halve
    engine.train(rows, sft_loss_fn)
    assert seen[1].mb_spec.max_tokens_per_mb == engine.token_budgets["tokens"]["actor"]["train"]
    assert seen[1].may_halve


def test_recorded_sizes_are_taken_up_on_a_device_of_the_same_size(engine: Engine) -> None:
    rows = train_rows(rollout(engine))
    engine.train(rows, sft_loss_fn)
    record = engine.token_budgets
    record["tokens"]["actor"]["train"] = 40
    engine.restore_token_budgets(record | {"device_bytes": 1})
    assert engine.token_budgets["tokens"]["actor"]["train"] > 40
    engine.restore_token_budgets(record)
    engine.train(train_rows(rollout(engine)), sft_loss_fn)
    assert engine.token_budgets["tokens"]["actor"]["train"] == 40


# -- running out of memory ---------------------------------------------------------------------------------------------


def out_of_memory_above(n_tokens: int, monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Let the forward pass of a model fail for micro-batches of more than `n_tokens` tokens. Returns their sizes."""
    forward, seen = model.forward, []

    def limited(tokens: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        seen.append(len(tokens))
        if len(tokens) > n_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return forward(tokens, *args, **how)

    monkeypatch.setattr(model, "forward", limited)
    return seen


@pytest.mark.parametrize("source", ["recompute", "rollout", "loglinear"])
def test_a_step_that_runs_out_of_memory_goes_on_with_halves(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn, old_logprobs=source)
    backend = make()
    seen = out_of_memory_above(60, monkeypatch, backend.model)
    stats, other = loss_and_gradient(backend, rows, grpo_loss_fn, WHOLE, old_logprobs=source, may_halve=True)
    assert stats == pytest.approx(expected)
    torch.testing.assert_close(other, gradient)
    assert max(seen) > 60  # it was tried
    assert seen[-1] <= 60


def test_pairs_stay_together_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, backend, sizes = make_rows(), make(), []
    out_of_memory_above(70, monkeypatch, backend.model)

    def see(pack: Any, logprobs: torch.Tensor) -> Any:
        sizes.append(pack.n_rows)
        return sft_loss_fn(pack, logprobs)

    train_on(backend, rows, see, WHOLE, rows_per_unit=2, may_halve=True)
    assert all(size % 2 == 0 for size in sizes)
    assert sum(sizes) == len(rows)


def test_a_unit_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    out_of_memory_above(1, monkeypatch, backend.model)
    with pytest.raises(Exception, match="out of device memory in training"):
        train_on(backend, make_rows(), sft_loss_fn, WHOLE, may_halve=True)


def test_a_lowered_size_stays_and_is_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = train_rows(rollout(engine))
    tokens = [row.tokens for row in rows]
    expected = engine.logprobs("actor", tokens)
    before = engine.token_budgets["tokens"]["actor"]
    seen = out_of_memory_above(90, monkeypatch, engine.workers.worker.actor)  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING, "areno"):
        found = engine.logprobs("actor", tokens)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    after = engine.token_budgets["tokens"]["actor"]
    assert after["score"] <= 180  # at 90 tokens the rows fit, perhaps at a size just above
    assert before["score"] % after["score"] == 0
    assert "scoring with the model of role actor" in caplog.text
    assert f"at most {after['score']:,} tokens" in caplog.text
    n_tried = len(seen)
    engine.logprobs("actor", tokens)
    assert max(seen[n_tried:]) <= 90  # it is not tried again
    engine.train(train_rows(rollout(engine)), grpo_loss_fn)
    assert engine.token_budgets["tokens"]["actor"]["train"] < before["train"]
    assert "training the model of role actor" in caplog.text


def test_in_deterministic_mode_it_is_an_error_that_names_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "model")
    with Engine(spec(folder, deterministic=True), "inline") as engine:
        rows = train_rows(rollout(engine))
        backend = engine.workers.worker.roles["actor"].backend  # type: ignore[union-attr]
        out_of_memory_above(90, monkeypatch, backend.model)
        backend.passes.kept_layers = RecomputationPolicy(backend.model, lambda: 2**30)
        with pytest.raises(Exception, match=r"max_tokens_per_mb.*a micro-batch of [\d,]+ tokens would fit") as error:
            engine.train(rows, grpo_loss_fn)
        assert "lower actor.mb_spec.max_tokens_per_mb" in str(error.value)
        with pytest.raises(Exception, match="out of device memory"):
            engine.logprobs("actor", [row.tokens for row in rows], SamplingConfig())
