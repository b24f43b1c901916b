"""The train backend with a tiny real model: its numbers do not depend on how rows are cut, packed or shared."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.engine.train.gradients import average_steps
from areno.errors import DataError, EngineError
from areno.kernels.attention import choose_backend
from areno.layers.attention import PackedAttend
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.models.registry import build_model, load_config
from areno.models.weights import load_weights
from tests.helpers.tiny_backend import (
    CONFIG,
    OPTIMIZER,
    VOCAB,
    WHOLE,
    Shares,
    loss_and_gradient,
    make,
    make_rows,
    model_config,
)
from tests.helpers.tiny_engine import train_on
from tests.helpers.train_backend import train_backend

LOSSES = {
    "sft": sft_loss_fn,
    "grpo": partial(grpo_loss_fn, kl_coef=0.1),
    "token_mean": partial(grpo_loss_fn, reduction="token_mean"),
    "gspo": partial(gspo_loss_fn, clip_eps=0.3),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_micro_batches_do_not_change_the_step(loss_fn):
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, loss_fn)
    assert gradient.abs().max() > 1e-3
    for spec in (MicroBatchSpec(mini_bs=1), MicroBatchSpec(mini_bs=3), MicroBatchSpec(max_tokens_per_mb=40)):
        stats, other = loss_and_gradient(make(), rows, loss_fn, spec)
        torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)
        assert stats == pytest.approx(expected, abs=1e-5, rel=1e-4)


def pair_loss_fn(pack, logprobs):
    """A term for each pair that mixes its two rows, so it tells whether they were together, and in which order."""
    assert pack.rows_per_unit == 2
    chosen, rejected = pack.sum_rows(pack.trained(logprobs)).view(-1, 2).unbind(1)
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - 2 * rejected)).sum() / max(pack.step_rows / 2, 1)
    return loss, {"margin": (chosen - rejected).detach()}


@pytest.mark.parametrize("n_minibatches", [1, 3])
def test_how_pairs_are_cut_does_not_change_the_step(n_minibatches):
    rows = make_rows(12)
    for row in rows:
        row.prompt_mask[-1] = False
    how = {"rows_per_unit": 2, "n_minibatches": n_minibatches, "seed": 5}
    backend = make()
    expected, gradient = loss_and_gradient(backend, rows, pair_loss_fn, **how)
    assert gradient.abs().max() > 1e-3
    for spec in (MicroBatchSpec(mini_bs=1), MicroBatchSpec(mini_bs=5), MicroBatchSpec(max_tokens_per_mb=60)):
        other = make()
        stats, last_gradient = loss_and_gradient(other, rows, pair_loss_fn, spec, **how)
        torch.testing.assert_close(last_gradient, gradient, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(other.flat.params, backend.flat.params, atol=1e-4, rtol=0)
        assert stats == pytest.approx(expected, abs=1e-4, rel=1e-3)
    if n_minibatches == 1:
        ranks = [Shares(rank) for rank in range(3)]
        losses = [train_on(make(dp=rank), rows, pair_loss_fn, WHOLE, **how)["loss"] for rank in ranks]
        torch.testing.assert_close(sum(rank.sent[0] for rank in ranks), gradient, atol=1e-6, rtol=1e-4)
        assert sum(losses) == pytest.approx(expected["loss"], abs=1e-6)
    with pytest.raises(DataError, match=r"4 rows, in units of 2, for 3 copies"):
        train_on(make(dp=Shares(0)), rows[:4], pair_loss_fn, WHOLE, rows_per_unit=2)
    with pytest.raises(DataError, match="11 rows, not a multiple of rows_per_unit=2"):
        train_on(make(), rows[:11], pair_loss_fn, WHOLE, rows_per_unit=2)


def test_data_parallel_shares_add_up():
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn)
    ranks = [Shares(rank) for rank in range(3)]
    losses = []
    for rank in ranks:
        losses.append(train_on(make(dp=rank), rows, grpo_loss_fn, MicroBatchSpec(mini_bs=2))["loss"])
    torch.testing.assert_close(sum(rank.sent[0] for rank in ranks), gradient, atol=1e-6, rtol=1e-4)
    assert sum(losses) == pytest.approx(expected["loss"], abs=1e-6)
    _, gradient = loss_and_gradient(make(), rows[:2], grpo_loss_fn)
    ranks = [Shares(rank) for rank in range(3)]  # one of which has no row
    for rank in ranks:
        train_on(make(dp=rank), rows[:2], grpo_loss_fn, WHOLE)
    torch.testing.assert_close(sum(rank.sent[0] for rank in ranks), gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_transformers(tmp_path, temperature):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**CONFIG)).float().eval()
    theirs.save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path), dtype=torch.float32, device="cpu")
    load_weights(model, tmp_path)
    backend = train_backend(model, None)
    token_rows = [row.tokens for row in make_rows(7)] + [[5]]
    # Padded, as one batch, on the right: causal attention keeps the padding out of sight.
    longest = max(map(len, token_rows))
    padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in token_rows])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in token_rows])
    with torch.no_grad():
        logp = torch.log_softmax(theirs(padded, attention_mask=mask).logits.double() / temperature, -1)
    for spec in (WHOLE, MicroBatchSpec(max_tokens_per_mb=30)):
        got = backend.logprobs(token_rows, SamplingConfig(temperature=temperature), spec)
        for i, tokens in enumerate(token_rows):
            want = [0.0] + [logp[i, t - 1, tokens[t]].item() for t in range(1, len(tokens))]
            assert got[i] == pytest.approx(want, abs=1e-4)
    assert backend.logprobs([], SamplingConfig(), WHOLE) == []


def test_gradient_equals_plain_autograd():
    """Row by row through the model's own logits and torch's softmax, instead of packed and chunked."""
    rows = make_rows(5)
    backend = make()
    _, gradient = loss_and_gradient(make(), rows, sft_loss_fn, sampling=SamplingConfig(temperature=0.7))
    model, total = backend.model, 0.0
    n = sum(not m for row in rows for m in row.prompt_mask)
    for row in rows:
        tokens = torch.tensor(row.tokens)
        cu = torch.tensor([0, len(tokens)], dtype=torch.int32)
        attend = PackedAttend(cu, len(tokens), "sdpa")
        hidden = model(tokens, torch.arange(len(tokens)), attend)
        logp = torch.log_softmax(hidden @ model.lm_head.weight.t() / 0.7, -1)
        for t, masked in enumerate(row.prompt_mask):
            if not masked:
                total = total - logp[t - 1, tokens[t]] / n
    total.backward()
    torch.testing.assert_close(backend.flat.grads, gradient, atol=1e-6, rtol=1e-4)


def test_gradient_accumulation_steps():
    backend = make()
    train_on(backend, make_rows(), sft_loss_fn, MicroBatchSpec(mini_bs=2), gradient_accumulation_steps=2)
    assert backend.optimizer.steps == 3


@pytest.mark.slow
def test_training_learns():
    backend = make(recompute=True)
    rows = make_rows()
    losses = [train_on(backend, rows, sft_loss_fn, MicroBatchSpec(mini_bs=4))["loss"] for _ in range(15)]
    assert losses[-1] < 0.6 * losses[0]


def test_metrics():
    backend, rows = make(), make_rows()
    scored = backend.logprobs([row.tokens for row in rows], SamplingConfig(), WHOLE)
    stats = train_on(backend, rows, grpo_loss_fn, MicroBatchSpec(mini_bs=3))
    by_row = [
        [
            values[1:]
            for values in zip(row.prompt_mask, row.logprobs, row.old_logprobs, new, row.advantages, strict=True)
            if not values[0]
        ]
        for row, new in zip(rows, scored, strict=True)
    ]
    trained = [values for of_row in by_row for values in of_row]
    n = len(trained)
    ratios = torch.tensor([math.exp(train - old) for _, old, train, _ in trained], dtype=torch.float64)
    expected = {
        "rollout_logprobs_mean": sum(r for r, *_ in trained) / n,
        "train_logprobs_mean": sum(t for _, _, t, _ in trained) / n,
        "logp_diff_mean": sum(r - o for r, o, *_ in trained) / n,
        "logp_abs_diff_mean": sum(abs(r - o) for r, o, *_ in trained) / n,
        "logp_abs_diff_max": max(abs(r - o) for r, o, *_ in trained),
        "logp_row_diff_mean": sum(abs(sum(r - o for r, o, *_ in row) / len(row)) for row in by_row if row) / 9,
        "ratio_mean": ratios.mean().item(),
        "ratio_std": ratios.std(correction=0).item(),
        "ratio_max": ratios.max().item(),
        "advantage_mean": sum(a for *_, a in trained) / n,
        "response_len": n / 9,
        "grad_norm": backend.flat.grads.norm().item(),
        "lr": 1e-2,
        "skipped_steps": 0,
        "total_loss": stats["loss"],
        "policy_loss": stats["loss"],
    }
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < stats["entropy"] < math.log(VOCAB)
    assert 0 <= stats["grad_zero_frac"] < 0.5


def test_several_steps_are_told_as_one():
    steps = [
        {"loss": 1.0, "ratio_max": 3.0, "lr": 0.2, "skipped_steps": 1.0},
        {"loss": 2.0, "ratio_max": 2.0, "lr": 0.1, "skipped_steps": 1.0},
    ]
    assert average_steps(steps) == {"loss": 1.5, "ratio_max": 3.0, "lr": 0.1, "skipped_steps": 2.0}
    later = [steps[0], {**steps[1], "rewards_chosen_mean": 4.0, "rewards_chosen_max": 5.0}]
    assert average_steps(later).items() >= {"rewards_chosen_mean": 4.0, "rewards_chosen_max": 5.0}.items()


def test_nonfinite_step_is_skipped():
    backend, rows = make(), make_rows()
    train_on(backend, rows, sft_loss_fn, WHOLE)
    before = {name: p.clone() for name, p in backend.model.named_parameters()}
    moments = backend.optimizer.moments["exp_avg"].clone()

    def broken(pack, logprobs):
        return logprobs.sum() * math.nan, {}

    def overflowing(pack, logprobs):
        return logprobs.sum() * 3e38 * 3e38, {}

    def broken_value_only(pack, logprobs):
        return logprobs.sum() + math.nan, {}

    for loss_fn in (broken, overflowing, broken_value_only):
        stats = train_on(backend, rows, loss_fn, MicroBatchSpec(mini_bs=4))
        assert stats["skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in backend.model.named_parameters())
    assert torch.equal(backend.optimizer.moments["exp_avg"], moments)
    assert (backend.optimizer.steps, backend.optimizer.skipped_steps) == (1, 3)
    assert train_on(backend, rows, sft_loss_fn, WHOLE)["skipped_steps"] == 0


def test_a_model_that_is_frozen_in_part_trains_the_rest():
    """With the gradients that the same parameters have where all is trained."""
    rows, whole = make_rows(), make()
    model = build_model(model_config(), dtype=torch.float32, device="cpu")
    model.init_weights(7)
    model.requires_grad_(False)
    model.layers[1].requires_grad_(True)
    backend = train_backend(model, OPTIMIZER, gradient_checkpointing=True)
    gradients = {}
    for each in (whole, backend):
        stats, _ = loss_and_gradient(each, rows, grpo_loss_fn)
        gradients[each] = {n: p.grad.clone() for n, p in each.model.named_parameters() if p.grad is not None}
        assert stats["skipped_steps"] == 0
    assert gradients[backend].keys() == {n for n, _ in model.named_parameters() if n.startswith("layers.1.")}
    for name, gradient in gradients[backend].items():
        torch.testing.assert_close(gradient, gradients[whole][name], atol=1e-6, rtol=1e-4)
    start = make().model
    moved = {n for (n, p), q in zip(model.named_parameters(), start.parameters(), strict=True) if not torch.equal(p, q)}
    assert moved == gradients[backend].keys()


def test_step_without_trained_tokens_is_skipped():
    backend, rows = make(), make_rows(3)
    for row in rows:
        row.prompt_mask = [True] * len(row.tokens)
    before = backend.flat.params.clone()
    stats = train_on(backend, rows, gspo_loss_fn, WHOLE)
    assert (stats["loss"], stats["skipped_steps"]) == (0, 1)
    assert not [name for name in stats if name.startswith("ratio")]  # nothing was observed
    assert torch.equal(backend.flat.params, before)


def test_bf16_model_trains():
    backend, reference = make(dtype=torch.bfloat16, recompute=True), make()
    rows = make_rows()
    stats, gradient = loss_and_gradient(backend, rows, sft_loss_fn)
    expected, exact = loss_and_gradient(reference, rows, sft_loss_fn)
    assert stats["loss"] == pytest.approx(expected["loss"], rel=0.02)
    cosine = torch.nn.functional.cosine_similarity(gradient, exact, dim=0)
    assert cosine > 0.99
    assert torch.equal(backend.flat.params, backend.flat.masters.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [WHOLE, MicroBatchSpec(max_tokens_per_mb=40)])
def test_cuda_agrees_with_cpu(spec):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    reference, rows = make(), make_rows()
    expected, exact = loss_and_gradient(reference, rows, grpo_loss_fn)
    model = build_model(model_config(), dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for mine, other in zip(model.parameters(), make().model.parameters(), strict=True):
            mine.copy_(other)
    attn_backend = choose_backend("auto", "cuda", torch.bfloat16)
    backend = train_backend(model, OPTIMIZER, attn_backend=attn_backend, gradient_checkpointing=True)
    stats, gradient = loss_and_gradient(backend, rows, grpo_loss_fn, spec)
    assert stats["train_logprobs_mean"] == pytest.approx(expected["train_logprobs_mean"], rel=0.02)
    assert torch.nn.functional.cosine_similarity(gradient.cpu(), exact, dim=0) > 0.98
    assert torch.equal(backend.flat.params, backend.flat.masters.bfloat16())


def test_reference_scores_but_does_not_train():
    backend = make(optimizer=None)
    assert not any(p.requires_grad for p in backend.model.parameters())
    with pytest.raises(EngineError, match="without an optimizer"):
        train_on(backend, make_rows(), sft_loss_fn, WHOLE)
