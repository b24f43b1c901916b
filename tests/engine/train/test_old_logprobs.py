"""What importance ratios divide by: the training pass of the policy before the first update of a batch."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from areno.bench.work import model_folder
from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.engine.engine import Engine
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import divide_steps, store_old_logprobs
from areno.errors import EngineError
from areno.layers.config import AdapterSpec
from areno.loss_fns import grpo_loss_fn, gspo_loss_fn, sft_loss_fn, value_loss_fn
from areno.models.registry import build_model
from areno.specs.role import LoraSpec
from areno.specs.update import UpdateSpec
from tests.helpers.tiny_backend import OPTIMIZER, WHOLE, make, make_rows
from tests.helpers.tiny_engine import request, rollout, spec, train_on, train_rows
from tests.helpers.train_backend import train_backend

FROZEN = dataclasses.replace(OPTIMIZER, lr=1e-30)
CUT = MicroBatchSpec(max_tokens_per_mb=40)


def fresh_rows(backend, apart=0.01, n=10):
    """Rows of a rollout whose log-probabilities differ from training's by rounding, `apart` here."""
    rows = make_rows(n)
    scored = backend.logprobs([row.tokens for row in rows], SamplingConfig(), WHOLE)
    for row, logprobs in zip(rows, scored, strict=True):
        row.old_logprobs = None
        row.logprobs = logprobs + apart * np.resize([1.0, -1.0, 1.0], len(logprobs)).astype(np.float32)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("how", [{}, {"n_minibatches": 3}, {"gradient_accumulation_steps": 1}], ids=str)
def test_with_unchanged_weights_every_update_has_ratio_one(dtype, recompute, how):
    """A clip range of 1e-12 would show a single bit."""
    backend = make(FROZEN, recompute, dtype)
    for loss_fn in (partial(gspo_loss_fn, clip_eps=1e-12), partial(grpo_loss_fn, clip_eps=1e-12)):
        stats = train_on(backend, fresh_rows(backend), loss_fn, CUT, **how)
        assert (stats["ratio_mean"], stats["ratio_std"], stats["ratio_max"]) == (1.0, 0.0, 1.0)
        assert stats["clip_frac"] == 0.0
        # In bfloat16, the rounding of the CPU's products adds to the difference.
        rounding = 0.05 if dtype == torch.float32 else 0.3
        assert stats["logp_abs_diff_mean"] == pytest.approx(0.01, rel=rounding), "the rollout is still compared"
        assert 0.0 < stats["logp_row_diff_mean"] <= 0.01 * (1.2 if dtype == torch.float32 else 1.5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["recurrent", "adapters", "experts with replay"])
def test_other_models_have_ratio_one_too(device, kind, tmp_path):
    """Rows of a real rollout, in bfloat16, with several updates of the batch."""
    shape = {"recurrent": "tiny-qwen3.5", "experts with replay": "tiny-moe"}.get(kind, "tiny")
    folder, _ = model_folder(shape, tmp_path / "model")
    lora = LoraSpec(adapters=AdapterSpec(4, 8.0, ("q_proj", "down_proj")), base=folder) if kind == "adapters" else None
    settings = {"dtype": "bfloat16", "optimizer": FROZEN, "lora": lora, "routing_replay": kind == "experts with replay"}
    with Engine(dataclasses.replace(spec(folder, **settings), devices=[device]), "inline") as engine:
        requests = [request(number, 4, 9 + number, ignore_eos=True) for number in range(3)]
        outputs = rollout(engine, requests)
        rows = train_rows(outputs, requests)
        routes = [output.routes for item in requests for output in outputs[item.request_id]]
        rows = [dataclasses.replace(row, routes=of_row) for row, of_row in zip(rows, routes, strict=True)]
        update = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=64), n_minibatches=3, seed=1)
        stats = engine.train(rows, partial(gspo_loss_fn, clip_eps=1e-9), update)
    assert (stats["ratio_mean"], stats["ratio_std"], stats["ratio_max"]) == (1.0, 0.0, 1.0)
    assert stats["clip_frac"] == 0.0


def test_against_the_rollout_rounding_clips():
    backend = make(FROZEN)
    stats = train_on(backend, fresh_rows(backend), gspo_loss_fn, WHOLE, old_logprobs="rollout")
    assert stats["clip_frac"] > 0.3
    assert stats["ratio_std"] > 3e-4


def test_later_updates_of_a_batch_compare_with_the_policy_before_the_first():
    backend, before = make(), make()
    rows = fresh_rows(backend)
    checked = read_rows(rows, 61)
    update = UpdateSpec(CUT, n_minibatches=2, seed=1)
    shares = divide_steps(checked, update)
    result = backend.train(shares[0], grpo_loss_fn, update)
    assert backend.optimizer.steps == 2
    assert result.stats["ratio_max"] > 1.001
    assert result.stats["logp_abs_diff_max"] == pytest.approx(0.01, rel=1e-3), "an update is not counted as a mismatch"
    store_old_logprobs(rows, shares, [result])
    scored = before.logprobs([row.tokens for row in rows], SamplingConfig(), WHOLE)
    for row, wanted in zip(rows, scored, strict=True):
        places = ~np.asarray(row.prompt_mask)
        np.testing.assert_allclose(row.old_logprobs[places], wanted[places], atol=1e-5)


def test_a_second_call_on_the_same_rows_compares_with_the_same_policy():
    backend, rows = make(), fresh_rows(make())
    first = call(backend, rows)
    kept = [row.old_logprobs.copy() for row in rows]
    second = call(backend, rows)
    assert (first["ratio_std"], first["ratio_max"]) == (0.0, 1.0)
    assert second["ratio_std"] > 1e-3
    assert all(np.array_equal(one, row.old_logprobs, equal_nan=True) for one, row in zip(kept, rows, strict=True))


def test_rows_of_an_earlier_call_may_be_trained_with_new_ones():
    backend, rows = make(FROZEN), fresh_rows(make())
    old, new = rows[:3], rows[4:7]
    call(backend, old)
    for row in old:
        row.old_logprobs = row.old_logprobs - np.float32(0.25)
    stats = call(backend, [*old, *new])
    n_old, n_new = (sum(np.count_nonzero(~np.asarray(row.prompt_mask)) for row in part) for part in (old, new))
    mean = (n_old * np.exp(0.25) + n_new) / (n_old + n_new)
    assert stats["ratio_mean"] == pytest.approx(mean, rel=1e-5)
    for row in new:
        assert np.array_equal(
            np.isnan(row.old_logprobs), np.asarray(row.prompt_mask) | (np.arange(len(row.tokens)) == 0)
        )


def test_tokens_that_were_not_trained_before_are_compared_with_the_policy_as_it_is():
    """Their old log-probability is not known, which is not 0."""
    backend, rows = make(FROZEN), fresh_rows(make())[4:8]
    masks = [np.asarray(row.prompt_mask).copy() for row in rows]
    for row, mask in zip(rows, masks, strict=True):
        row.prompt_mask = mask | (np.arange(len(mask)) % 2 == 0)
    call(backend, rows)
    for row, mask in zip(rows, masks, strict=True):
        assert np.isnan(row.old_logprobs[np.asarray(row.prompt_mask)]).all()
        row.prompt_mask = mask
    stats = call(backend, rows)
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["ratio_std"] < 1e-5
    assert all(np.isfinite(row.old_logprobs[~mask]).all() for row, mask in zip(rows, masks, strict=True))


def test_a_critic_leaves_the_rows_as_they_are():
    backend = make(FROZEN)
    rows = fresh_rows(backend)
    call(backend, rows[:4])
    config = dataclasses.replace(backend.model.config, head="value")
    critic = train_backend(build_model(config, dtype=torch.float32, device="cpu"), FROZEN)
    for row in rows:
        row.values, row.returns = [0.0] * len(row.tokens), [1.0] * len(row.tokens)
    call(critic, rows, value_loss_fn)
    assert all(row.old_logprobs is None for row in rows[4:])
    assert call(backend, rows)["ratio_std"] < 1e-5


def test_what_needs_no_ratio_is_not_scored(monkeypatch):
    """Supervised rows bring no log-probabilities; exact mode's rollout has the bits of training."""
    backend, passes = make(FROZEN), []
    scored = backend.no_grad_logprobs
    monkeypatch.setattr(backend, "no_grad_logprobs", lambda *args, **more: passes.append(1) or scored(*args, **more))
    rows = fresh_rows(backend, apart=0.0)
    bare = [dataclasses.replace(row, logprobs=None, ref_logprobs=None) for row in rows]
    train_on(backend, bare, sft_loss_fn, CUT, gradient_accumulation_steps=1)
    train_on(backend, rows, grpo_loss_fn, CUT)
    assert not passes
    train_on(backend, rows, grpo_loss_fn, CUT, n_minibatches=2)
    assert passes
    passes.clear()
    backend.exact = True
    own = [dataclasses.replace(row, old_logprobs=None) for row in rows]
    with pytest.raises(EngineError, match="disagrees"):  # this rollout differs in a last bit
        train_on(backend, fresh_rows(backend, apart=1e-3), grpo_loss_fn, WHOLE)
    train_on(backend, own, grpo_loss_fn, WHOLE, n_minibatches=2)
    assert not passes
    stale = [dataclasses.replace(row, staleness=1, old_logprobs=None) for row in rows]
    train_on(backend, stale, grpo_loss_fn, WHOLE, n_minibatches=2)
    assert passes, "weights have changed since, so the rollout's are not those before the update"


def test_loglinear_interpolates_after_the_first_update():
    backend, rows = make(), fresh_rows(make())
    loss_fn = partial(grpo_loss_fn, prox_logp_method="loglinear")
    stats = train_on(backend, rows, loss_fn, WHOLE, old_logprobs="loglinear")
    assert (stats["ratio_std"], stats["ratio_max"]) == (0.0, 1.0)
    assert stats["weights_std"] > 0.005, "what the rollout's differ by is corrected"
    for row in rows:
        row.staleness = 1
    later = train_on(make(), rows, loss_fn, WHOLE, old_logprobs="loglinear", n_minibatches=2)
    assert later["ratio_std"] > 1e-3


def call(backend, rows, loss_fn=grpo_loss_fn):
    """Trainer.train on one rank."""
    checked, update = read_rows(rows, 61), UpdateSpec(CUT)
    shares = divide_steps(checked, update)
    result = backend.train(shares[0], loss_fn, update)
    store_old_logprobs(rows, shares, [result])
    return result.stats
