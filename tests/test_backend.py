"""The train backend with a tiny real model: its numbers do not depend on how rows are cut, packed or recomputed."""

from __future__ import annotations

import json
import math
import random
from functools import partial

import pytest
import torch

from areno.config.model_roles import MicroBatchSpec, OptimizerConfig
from areno.engine.train import backend as backend_module
from areno.engine.train.activations import layers_to_keep
from areno.engine.train.backend import TrainBackend
from areno.engine.train.stats import over_steps
from areno.engine.types import TrainSequence
from areno.errors import DataError, EngineError
from areno.kernels.attention import choose_backend
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.loss_fns.value import value_loss_fn
from areno.models.registry import build_model, load_config
from areno.models.weights import load_weights

VOCAB = 61
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}
OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
WHOLE = MicroBatchSpec(mini_bs=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def make(folder):
    """Backends over the same weights."""

    def build(optimizer=OPTIMIZER, recompute=False, dtype=torch.float32, **kwargs):
        model = build_model(load_config(folder), dtype=dtype, device="cpu")
        model.init_weights(7)
        return TrainBackend(model, optimizer, attn_backend="sdpa", recompute=recompute, **kwargs)

    return build


def make_rows(n=10, seed=0):
    """Different lengths, holes in the mask, one row without a trained token."""
    rng = random.Random(seed)
    rows = []
    for index in range(n):
        size = rng.randint(3, 24)
        mask = [True] * 2 + [rng.random() < 0.25 for _ in range(size - 2)]
        if index == 3:
            mask = [True] * size
        rows.append(
            TrainSequence(
                tokens=[rng.randrange(VOCAB) for _ in range(size)],
                prompt_mask=mask,
                logprobs=[0.0 if m else -rng.uniform(1, 5) for m in mask],
                advantages=[rng.gauss(0, 1)] * size,
                ref_logprobs=[-rng.uniform(1, 5) for _ in mask],
            )
        )
    return rows


def loss_and_gradient(backend, rows, loss_fn, spec=WHOLE, **how):
    stats = backend.train(rows, loss_fn, mb_spec=spec, **how)
    return stats, backend.flat.grads.clone()


LOSSES = {
    "sft": sft_loss_fn,
    "grpo": partial(grpo_loss_fn, kl_coef=0.1),
    "token_mean": partial(grpo_loss_fn, reduction="token_mean"),
    "gspo": partial(gspo_loss_fn, clip_eps=0.3),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_micro_batches_do_not_change_the_step(make, loss_fn):
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, loss_fn)
    assert gradient.abs().max() > 1e-3
    for spec in (MicroBatchSpec(mini_bs=1), MicroBatchSpec(mini_bs=3), MicroBatchSpec(max_tokens_per_mb=40)):
        stats, other = loss_and_gradient(make(), rows, loss_fn, spec)
        torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)
        assert stats == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_recompute_does_not_change_the_step(make):
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn)
    stats, other = loss_and_gradient(make(recompute=True), rows, grpo_loss_fn)
    assert stats == pytest.approx(expected)
    torch.testing.assert_close(other, gradient)


def test_layers_are_kept_as_memory_allows(make):
    model = make().model
    layer = model.layers[0]
    each = 100 * 4 * (layer.attention.qkv.weight.shape[0] + layer.mlp.gate_up.weight.shape[0])
    first = next(free for free in range(2**31, 2**33, each // 4) if layers_to_keep(model, 100, free))
    assert layers_to_keep(model, 100, 0) == 0
    assert layers_to_keep(model, 100, first + each) == 2
    assert layers_to_keep(model, 100, 2**50) == 2
    assert layers_to_keep(model, 1000, first) == 0


def test_kept_layers_do_not_change_the_step(make, monkeypatch):
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn)
    backend = make(recompute=True)
    forward = backend.model.forward
    monkeypatch.setattr(backend.model, "forward", lambda *args, **how: forward(*args, **{**how, "n_kept": 1}))
    stats, other = loss_and_gradient(backend, rows, grpo_loss_fn)
    assert stats == pytest.approx(expected)
    torch.testing.assert_close(other, gradient)


def pair_loss_fn(pack, logprobs):
    """A term for each pair that mixes its two rows, so it tells whether they were together, and in which order."""
    assert pack.granularity == 2
    chosen, rejected = pack.sum_rows(pack.trained(logprobs)).view(-1, 2).unbind(1)
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - 2 * rejected)).sum() / max(pack.step_rows / 2, 1)
    return loss, {"margin": (chosen - rejected).detach()}


@pytest.mark.parametrize("n_minibatches", [1, 3])
def test_how_pairs_are_cut_does_not_change_the_step(make, n_minibatches):
    rows = make_rows(12)
    for row in rows:
        row.prompt_mask[-1] = False
    how = {"granularity": 2, "n_minibatches": n_minibatches, "seed": 5}
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
        losses = [make(dp=rank).train(rows, pair_loss_fn, mb_spec=WHOLE, **how)["loss"] for rank in ranks]
        torch.testing.assert_close(sum(rank.sent[0] for rank in ranks), gradient, atol=1e-6, rtol=1e-4)
        assert sum(losses) == pytest.approx(expected["loss"], abs=1e-6)
    with pytest.raises(DataError, match=r"4 rows, in units of 2, for 3 copies"):
        make(dp=Shares(0)).train(rows[:4], pair_loss_fn, mb_spec=WHOLE, granularity=2)
    with pytest.raises(DataError, match="11 rows, not a multiple of granularity=2"):
        make().train(rows[:11], pair_loss_fn, mb_spec=WHOLE, granularity=2)


# --- the value head ---


@pytest.fixture
def make_critic(folder):
    """Critics with the same random body and head."""

    def build(optimizer=OPTIMIZER, recompute=False, dtype=torch.float32, device="cpu", **kwargs):
        model = build_model(load_config(folder, "value"), dtype=torch.float32, device="cpu")
        model.init_weights(7)
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
        model.to(device, dtype)
        attn_backend = choose_backend("auto", device, dtype)
        return TrainBackend(model, optimizer, attn_backend=attn_backend, recompute=recompute, **kwargs)

    return build


def critic_rows():
    rows, rng = make_rows(), random.Random(1)
    for row in rows:
        row.values = [rng.gauss(0, 0.3) for _ in row.tokens]
        row.returns = [rng.gauss(0, 1) for _ in row.tokens]
    return rows


def test_values_and_rewards_equal_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**CONFIG, num_labels=1)
    theirs = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    theirs.save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path, "value"), dtype=torch.float32, device="cpu")
    load_weights(model, tmp_path)
    backend = TrainBackend(model, None, attn_backend="sdpa")
    token_rows = [row.tokens for row in make_rows(7)] + [[5]]
    for spec in (WHOLE, MicroBatchSpec(mini_bs=3), MicroBatchSpec(max_tokens_per_mb=30)):
        values, rewards = backend.values(token_rows, spec), backend.rewards(token_rows, spec)
        for tokens, values_of_row, reward in zip(token_rows, values, rewards, strict=True):
            with torch.no_grad():
                outputs = theirs.score(theirs.model(torch.tensor([tokens])).last_hidden_state)[0, :, 0].tolist()
                assert reward == pytest.approx(theirs(torch.tensor([tokens])).logits.item(), abs=1e-4)
            assert values_of_row == pytest.approx([0.0, *outputs[:-1]], abs=1e-4)
    assert (backend.values([], WHOLE), backend.rewards([], WHOLE)) == ([], [])
    with pytest.raises(DataError, match="row 1: tokens is empty"):
        backend.rewards([[1], []], WHOLE)


def test_micro_batches_do_not_change_the_critics_step(make_critic):
    rows = critic_rows()
    expected, gradient = loss_and_gradient(make_critic(), rows, value_loss_fn)
    assert gradient.abs().max() > 1e-3
    assert expected.keys() >= {"loss", "grad_norm", "lr", "skipped_steps", "response_len"}
    assert not expected.keys() & {"logp_diff_mean", "train_logprobs_mean", "entropy"}
    for spec in (MicroBatchSpec(mini_bs=1), MicroBatchSpec(mini_bs=3), MicroBatchSpec(max_tokens_per_mb=40)):
        stats, other = loss_and_gradient(make_critic(recompute=spec.mini_bs == 3), rows, value_loss_fn, spec)
        torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)
        assert stats == pytest.approx(expected, abs=1e-5, rel=1e-4)
    ranks = [Shares(rank) for rank in range(3)]
    for rank in ranks:
        make_critic(dp=rank).train(rows, value_loss_fn, mb_spec=MicroBatchSpec(mini_bs=2))
    torch.testing.assert_close(sum(rank.sent[0] for rank in ranks), gradient, atol=1e-6, rtol=1e-4)


def test_the_critics_gradient_equals_plain_autograd(make_critic):
    """Row by row in float64 arithmetic on the model's outputs: the mean of the larger squared error, times 0.5."""
    rows, clip = critic_rows(), 0.2
    _, gradient = loss_and_gradient(make_critic(), rows, partial(value_loss_fn, cliprange_value=clip))
    backend = make_critic()
    model, total = backend.model, 0.0
    n = sum(not m for row in rows for m in row.prompt_mask)
    for row in rows:
        tokens = torch.tensor(row.tokens)
        attend = backend_module.PackedAttend(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens), "sdpa")
        outputs = (model(tokens, torch.arange(len(tokens)), attend) @ model.score.weight[0]).double()
        for t, masked in enumerate(row.prompt_mask):
            if not masked:
                near = row.values[t] + (outputs[t - 1] - row.values[t]).clamp(-clip, clip)
                errors = torch.stack([outputs[t - 1] - row.returns[t], near - row.returns[t]]).square()
                total = total + 0.5 * errors.max() / n
    total.backward()
    torch.testing.assert_close(backend.flat.grads, gradient, atol=1e-6, rtol=1e-4)


def test_a_critic_learns_its_targets(make_critic):
    backend, rows = make_critic(recompute=True), critic_rows()
    loss_fn = partial(value_loss_fn, cliprange_value=100.0)
    losses = [backend.train(rows, loss_fn, mb_spec=MicroBatchSpec(mini_bs=4))["loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    fitted = backend.values([row.tokens for row in rows], WHOLE)
    errors = [
        value - target
        for row, values in zip(rows, fitted, strict=True)
        for value, target, masked in zip(values, row.returns, row.prompt_mask, strict=True)
        if not masked
    ]
    assert sum(e * e for e in errors) / len(errors) < 0.35


@pytest.mark.gpu
def test_a_bf16_critic_on_cuda_agrees_with_the_cpu(make_critic):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rows = critic_rows()
    token_rows = [row.tokens for row in rows]
    reference, backend = make_critic(), make_critic(recompute=True, dtype=torch.bfloat16, device="cuda")
    exact_values, exact_rewards = reference.values(token_rows, WHOLE), reference.rewards(token_rows, WHOLE)
    values, rewards = backend.values(token_rows, WHOLE), backend.rewards(token_rows, MicroBatchSpec(mini_bs=3))
    assert rewards == pytest.approx(exact_rewards, abs=0.25)
    assert torch.corrcoef(torch.tensor([rewards, exact_rewards]))[0, 1] > 0.999
    assert [row[0] for row in values] == [0.0] * len(rows)
    for row, exact in zip(values, exact_values, strict=True):
        assert row == pytest.approx(exact, abs=0.25)
    expected, exact_gradient = loss_and_gradient(reference, rows, value_loss_fn)
    stats, gradient = loss_and_gradient(backend, rows, value_loss_fn, MicroBatchSpec(max_tokens_per_mb=40))
    assert stats["loss"] == pytest.approx(expected["loss"], rel=0.05)
    assert torch.nn.functional.cosine_similarity(gradient.cpu(), exact_gradient, dim=0) > 0.98
    assert torch.equal(backend.flat.params, backend.flat.masters.bfloat16())


class Shares:
    """Data-parallel ranks run one after the other: what they would sum is added up here by hand."""

    size = 3

    def __init__(self, rank):
        self.rank = rank
        self.sent = []

    def all_reduce(self, x, op=None):
        self.sent.append(x.clone())
        return x


def test_data_parallel_shares_add_up(make):
    rows = make_rows()
    expected, gradient = loss_and_gradient(make(), rows, grpo_loss_fn)
    ranks = [Shares(rank) for rank in range(3)]
    losses = []
    for rank in ranks:
        losses.append(make(dp=rank).train(rows, grpo_loss_fn, mb_spec=MicroBatchSpec(mini_bs=2))["loss"])
    torch.testing.assert_close(sum(rank.sent[0] for rank in ranks), gradient, atol=1e-6, rtol=1e-4)
    assert sum(losses) == pytest.approx(expected["loss"], abs=1e-6)
    with pytest.raises(DataError, match="2 rows for 3 copies"):
        make(dp=Shares(0)).train(rows[:2], grpo_loss_fn, mb_spec=WHOLE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_transformers(tmp_path, temperature):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**CONFIG)).float().eval()
    theirs.save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path), dtype=torch.float32, device="cpu")
    load_weights(model, tmp_path)
    backend = TrainBackend(model, None, attn_backend="sdpa")
    token_rows = [row.tokens for row in make_rows(7)] + [[5]]
    # Padded, as one batch, on the right: causal attention keeps the padding out of sight.
    longest = max(map(len, token_rows))
    padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in token_rows])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in token_rows])
    with torch.no_grad():
        logp = torch.log_softmax(theirs(padded, attention_mask=mask).logits.double() / temperature, -1)
    for spec in (WHOLE, MicroBatchSpec(max_tokens_per_mb=30)):
        got = backend.logprobs(token_rows, temperature, spec)
        for i, tokens in enumerate(token_rows):
            want = [0.0] + [logp[i, t - 1, tokens[t]].item() for t in range(1, len(tokens))]
            assert got[i] == pytest.approx(want, abs=1e-4)
    assert backend.logprobs([], 1.0, WHOLE) == []


def test_gradient_equals_plain_autograd(make):
    """Row by row through the model's own logits and torch's softmax, instead of packed and chunked."""
    rows = make_rows(5)
    backend = make()
    _, gradient = loss_and_gradient(make(), rows, sft_loss_fn, temperature=0.7)
    model, total = backend.model, 0.0
    n = sum(not m for row in rows for m in row.prompt_mask)
    for row in rows:
        tokens = torch.tensor(row.tokens)
        cu = torch.tensor([0, len(tokens)], dtype=torch.int32)
        attend = backend_module.PackedAttend(cu, len(tokens), "sdpa")
        hidden = model(tokens, torch.arange(len(tokens)), attend)
        logp = torch.log_softmax(hidden @ model.head_weight.t() / 0.7, -1)
        for t, masked in enumerate(row.prompt_mask):
            if not masked:
                total = total - logp[t - 1, tokens[t]] / n
    total.backward()
    torch.testing.assert_close(backend.flat.grads, gradient, atol=1e-6, rtol=1e-4)


def with_own_logprobs(backend, rows):
    for row, logprobs in zip(rows, backend.logprobs([row.tokens for row in rows], 1.0, WHOLE), strict=True):
        row.logprobs = logprobs
    return rows


def test_ratios_are_against_the_rollout(make):
    backend = make()
    rows = with_own_logprobs(backend, make_rows())
    on_policy = backend.train(rows, grpo_loss_fn, mb_spec=WHOLE)
    assert on_policy["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert on_policy["ratio_std"] == pytest.approx(0.0, abs=1e-3)
    assert on_policy["logp_abs_diff_max"] < 1e-4
    assert on_policy["clip_frac"] == 0.0

    backend = make()
    rows = with_own_logprobs(backend, make_rows())
    off_policy = backend.train(rows, grpo_loss_fn, mb_spec=WHOLE, n_minibatches=2, seed=1)
    assert backend.optimizer.steps == 2
    assert off_policy["ratio_max"] > 1.001
    assert off_policy["ratio_std"] > 1e-3
    assert off_policy["logp_abs_diff_max"] > 1e-3


def test_gradient_accumulation_steps(make):
    backend = make()
    backend.train(make_rows(), sft_loss_fn, mb_spec=MicroBatchSpec(mini_bs=2), gradient_accumulation_steps=2)
    assert backend.optimizer.steps == 3


def test_training_learns(make):
    backend = make(recompute=True)
    rows = make_rows()
    losses = [backend.train(rows, sft_loss_fn, mb_spec=MicroBatchSpec(mini_bs=4))["loss"] for _ in range(15)]
    assert losses[-1] < 0.6 * losses[0]


def test_metrics(make):
    backend, rows = make(), make_rows()
    scored = backend.logprobs([row.tokens for row in rows], 1.0, WHOLE)
    stats = backend.train(rows, grpo_loss_fn, mb_spec=MicroBatchSpec(mini_bs=3))
    trained = [
        (rollout, train, advantage)
        for row, logprobs in zip(rows, scored, strict=True)
        for m, rollout, train, advantage in zip(row.prompt_mask, row.logprobs, logprobs, row.advantages, strict=True)
        if not m
    ]
    n = len(trained)
    ratios = torch.tensor([math.exp(train - rollout) for rollout, train, _ in trained], dtype=torch.float64)
    expected = {
        "rollout_logprobs_mean": sum(r for r, _, _ in trained) / n,
        "train_logprobs_mean": sum(t for _, t, _ in trained) / n,
        "logp_diff_mean": sum(r - t for r, t, _ in trained) / n,
        "logp_abs_diff_mean": sum(abs(r - t) for r, t, _ in trained) / n,
        "logp_abs_diff_max": max(abs(r - t) for r, t, _ in trained),
        "ratio_mean": ratios.mean().item(),
        "ratio_std": ratios.std(correction=0).item(),
        "ratio_max": ratios.max().item(),
        "advantage_mean": sum(a for _, _, a in trained) / n,
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
    assert over_steps(steps) == {"loss": 1.5, "ratio_max": 3.0, "lr": 0.1, "skipped_steps": 2.0}


def test_nonfinite_step_is_skipped(make):
    backend, rows = make(), make_rows()
    backend.train(rows, sft_loss_fn, mb_spec=WHOLE)
    before = {name: p.clone() for name, p in backend.model.named_parameters()}
    moments = backend.optimizer.exp_avg.clone()

    def broken(pack, logprobs):
        return logprobs.sum() * math.nan, {}

    def overflowing(pack, logprobs):
        return logprobs.sum() * 3e38 * 3e38, {}

    def broken_value_only(pack, logprobs):
        return logprobs.sum() + math.nan, {}

    for loss_fn in (broken, overflowing, broken_value_only):
        stats = backend.train(rows, loss_fn, mb_spec=MicroBatchSpec(mini_bs=4))
        assert stats["skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in backend.model.named_parameters())
    assert torch.equal(backend.optimizer.exp_avg, moments)
    assert (backend.optimizer.steps, backend.optimizer.skipped_steps) == (1, 3)
    assert backend.train(rows, sft_loss_fn, mb_spec=WHOLE)["skipped_steps"] == 0


def test_step_without_trained_tokens_is_skipped(make):
    backend, rows = make(), make_rows(3)
    for row in rows:
        row.prompt_mask = [True] * len(row.tokens)
    before = backend.flat.params.clone()
    stats = backend.train(rows, gspo_loss_fn, mb_spec=WHOLE)
    assert (stats["loss"], stats["skipped_steps"], stats["ratio_max"]) == (0, 1, 0)
    assert torch.equal(backend.flat.params, before)


def test_bf16_model_trains(make):
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
def test_cuda_agrees_with_cpu(folder, make, spec):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    reference, rows = make(), make_rows()
    expected, exact = loss_and_gradient(reference, rows, grpo_loss_fn)
    model = build_model(load_config(folder), dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for mine, other in zip(model.parameters(), make().model.parameters(), strict=True):
            mine.copy_(other)
    attn_backend = choose_backend("auto", "cuda", torch.bfloat16)
    backend = TrainBackend(model, OPTIMIZER, attn_backend=attn_backend, recompute=True)
    stats, gradient = loss_and_gradient(backend, rows, grpo_loss_fn, spec)
    assert stats["train_logprobs_mean"] == pytest.approx(expected["train_logprobs_mean"], rel=0.02)
    assert torch.nn.functional.cosine_similarity(gradient.cpu(), exact, dim=0) > 0.98
    assert torch.equal(backend.flat.params, backend.flat.masters.bfloat16())


def test_reference_scores_but_does_not_train(make):
    backend = make(optimizer=None)
    assert not any(p.requires_grad for p in backend.model.parameters())
    with pytest.raises(EngineError, match="without an optimizer"):
        backend.train(make_rows(), sft_loss_fn, mb_spec=WHOLE)
    with pytest.raises(DataError, match="row 1: tokens is empty"):
        backend.logprobs([[1], []], 1.0, WHOLE)


def test_out_of_memory_names_the_keys(make, monkeypatch):
    backend = make()

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend, "_logprobs", full)
    for call in (
        lambda: backend.train(make_rows(), sft_loss_fn, mb_spec=WHOLE),
        lambda: backend.logprobs([[1, 2]], 1.0, WHOLE),
    ):
        with pytest.raises(EngineError) as caught:
            call()
        for key in ("max_tokens_per_mb", "mini_bs", "gradient_checkpointing", "rollout.mem_fraction"):
            assert key in str(caught.value)
