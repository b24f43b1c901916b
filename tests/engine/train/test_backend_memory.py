"""The train backend and memory: recomputation, layers that keep their activations, steps that run out of memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.cost.memory import PassBytes
from areno.engine.engine import Engine
from areno.engine.train.recomputation import RecomputationPolicy
from areno.errors import EngineError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.rollout import RolloutSpec
from tests.helpers.interpreted import run_interpreted
from tests.helpers.processes import worker_of
from tests.helpers.tiny_backend import WHOLE, loss_and_gradient, make, make_rows
from tests.helpers.tiny_engine import model_folder, rollout, spec, tokens_of, train_on


def test_recompute_does_not_change_the_step():
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn)
    stats, other = loss_and_gradient(make(recompute=True), rows, grpo_loss_fn)
    assert stats == pytest.approx(expected)
    torch.testing.assert_close(other, gradient)


def test_layers_are_kept_as_memory_allows():
    model = make().model
    layer = model.layers[0]
    each = 100 * 4 * (layer.attention.qkv.weight.shape[0] + layer.mlp.gate_up.weight.shape[0])

    def kept(n_tokens, free):
        return RecomputationPolicy(model, lambda: free).n_kept_layers(n_tokens)

    first = next(free for free in range(0, 2**33, each // 4) if kept(100, free))
    assert kept(100, 0) == 0
    assert kept(100, first + each) == 2
    assert kept(100, 2**50) == 2
    assert kept(1000, first) == 0
    with torch.no_grad():
        assert kept(100, 2**50) == 0


def test_kept_layers_do_not_change_the_step(monkeypatch):
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn)
    backend = make(recompute=True)
    forward = backend.model.forward
    monkeypatch.setattr(backend.model, "forward", lambda *args, **how: forward(*args, **{**how, "n_kept": 1}))
    stats, other = loss_and_gradient(backend, rows, grpo_loss_fn)
    assert stats == pytest.approx(expected)
    torch.testing.assert_close(other, gradient)


@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_keeps_less_and_is_the_same(monkeypatch):
    rows, spec = make_rows(), MicroBatchSpec(mini_bs=3)
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn, spec)
    backend = make(recompute=True)
    forward, kept = backend.model.forward, []

    def short_of_memory(*args, **how):
        kept.append(how["n_kept"])
        if how["n_kept"] > 1 and len(kept) > 2:  # the gradient of two micro-batches is there already
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **how)

    monkeypatch.setattr(backend.model, "forward", short_of_memory)
    sizes = itertools.count(step=100_000)
    growing = RecomputationPolicy(backend.model, lambda: next(sizes))
    enough = 100_000 * next(n for n in itertools.count() if growing.n_kept_layers(80) == 2)
    backend.passes.kept_layers = RecomputationPolicy(backend.model, lambda: enough)
    stats, other = loss_and_gradient(backend, rows, grpo_loss_fn, spec)
    assert stats == pytest.approx(expected)
    torch.testing.assert_close(other, gradient)
    assert kept[:3] == [2, 2, 2]
    assert max(kept[-4:]) < 2  # the pass that succeeds, over 4 micro-batches
    n_before = len(kept)
    loss_and_gradient(backend, rows, grpo_loss_fn, spec)
    assert max(kept[n_before:]) < 2  # learned for good

    monkeypatch.setattr(backend.model, "forward", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    n_fitting = PassBytes.for_training(backend.model.config, 4).fitting_tokens(2**33) // 256 * 256
    backend.passes.kept_layers = RecomputationPolicy(backend.model, lambda: 2**33)
    with pytest.raises(EngineError, match=f"in training.* a micro-batch of {n_fitting:,} tokens would fit.* host"):
        train_on(backend, rows, sft_loss_fn, spec)
    backend.passes.kept_layers = RecomputationPolicy(backend.model, lambda: 0)
    with pytest.raises(EngineError, match="no micro-batch fits"):
        train_on(backend, rows, sft_loss_fn, spec)


def compare_offloaded() -> None:
    """Run in a process of its own, where Triton interprets: a step with layer inputs in host memory has equal bits."""
    rows, spec = make_rows(), MicroBatchSpec(mini_bs=5)
    expected, gradient = loss_and_gradient(make(recompute=True), rows, grpo_loss_fn, spec)
    backend, places = make(recompute=True), []
    backend.passes.kept_layers = RecomputationPolicy(backend.model, lambda: 0)
    begin = RecomputationPolicy.begin_offload

    def record(policy: RecomputationPolicy, n_tokens: int):
        places.append(begin(policy, n_tokens))
        return places[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecomputationPolicy, "begin_offload", record)
        stats, other = loss_and_gradient(backend, rows, grpo_loss_fn, spec)
    assert stats == expected
    assert torch.equal(other, gradient)
    assert len(places) == 2
    assert places[0] is places[1] is not None
    with torch.no_grad():
        assert backend.passes.kept_layers.begin_offload(10) is None


@pytest.mark.slow
def test_inputs_of_layers_in_host_memory_do_not_change_the_step():
    code = "from tests.engine.train.test_backend_memory import compare_offloaded; compare_offloaded()"
    run_interpreted(code)


def test_inputs_of_layers_go_to_host_memory_only_if_they_must(monkeypatch, caplog):
    model = make().model
    need = PassBytes.for_training(model.config, 4)

    def place(free, n_tokens=100):
        policy = RecomputationPolicy(model, lambda: free)
        policy.n_kept_layers(n_tokens)
        return policy, policy.begin_offload(n_tokens)

    assert place(need.total(100))[1] is None
    caplog.set_level("INFO")
    policy, offload = place(need.total(100) - 1)
    assert offload is not None
    said = "a micro-batch of 100 tokens keeps the inputs of 1 of 2 layers in 0.00 GiB of host memory"
    assert caplog.messages == [said]
    assert policy.begin_offload(100) is offload
    assert policy.begin_offload(200) is offload
    assert len(caplog.messages) == 2  # once for each new largest size
    assert not policy.offload_more()
    # The bound says that all fits. If it does not, the next attempt assumes that less is free.
    policy, offload = place(need.total(100))
    assert not policy.recompute_more()
    assert policy.offload_more()
    assert policy.begin_offload(100) is not None
    monkeypatch.setattr("areno.engine.train.recomputation.host_bytes_free", lambda: 100)
    policy, offload = place(0)
    assert offload is None
    assert not policy.offload_more()


def test_a_row_that_does_not_fit_beside_the_kv_cache_frees_it(caplog):
    model = make().model
    need = PassBytes.for_training(model.config, 4)
    least, all_needed = need.offloading(2, 2).expected(100), need.total(100)
    caplog.set_level("INFO")
    for free, alone, frees in ((all_needed, True, False), (least, True, False), (least - 1, True, True)):
        sizes = {"free": free}

        def free_cache(sizes=sizes):
            sizes["free"] = all_needed
            return True

        caplog.clear()
        policy = RecomputationPolicy(model, lambda sizes=sizes: sizes["free"], alone, free_cache=free_cache)
        place = policy.begin_offload(100)
        assert (sizes["free"] > free) == frees
        assert (place is None) == (free == all_needed or frees)
        assert any("does not fit beside the KV cache" in said for said in caplog.messages) == frees
    assert policy.free_cache()  # after memory ran out nevertheless
    # Other ranks would wait for this one when they make their caches again.
    policy = RecomputationPolicy(model, lambda: 0, alone=False, free_cache=lambda: pytest.fail("freed"))
    assert policy.begin_offload(100) is not None
    assert not policy.free_cache()


def test_only_an_idle_kv_cache_is_freed(tmp_path):
    with Engine(spec(model_folder(tmp_path)), "inline") as engine:
        worker = worker_of(engine)
        policy = worker.roles["actor"].backend.passes.kept_layers
        assert not policy.free_cache()
        engine.begin_rollout(RolloutSpec(max_running=2, max_len=32))
        assert not policy.free_cache()
        engine.end_rollout()
        assert policy.free_cache()
        assert worker.decoder is None
        expected = tokens_of(rollout(engine))
        assert policy.free_cache()
        assert tokens_of(rollout(engine)) == expected


def test_out_of_memory_names_the_keys(monkeypatch):
    backend = make()

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend.passes, "logprobs", full)
    for call in (
        lambda: train_on(backend, make_rows(), sft_loss_fn, WHOLE),
        lambda: backend.logprobs([[1, 2]], SamplingConfig(), WHOLE),
    ):
        with pytest.raises(EngineError) as caught:
            call()
        for key in ("lower actor.mb_spec.mini_bs", "adam_8bit", "engine.tp_size"):
            assert key in str(caught.value)
