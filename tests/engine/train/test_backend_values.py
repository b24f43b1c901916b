"""The train backend of a model with a value head: its values, rewards and gradients."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.kernels.attention import choose_backend
from areno.layers.attention import PackedAttend
from areno.loss_fns.ppo import value_loss_fn
from areno.models.registry import build_model, load_config
from areno.models.weights import load_weights
from tests.helpers.tiny_backend import CONFIG, OPTIMIZER, WHOLE, Shares, loss_and_gradient, make_rows
from tests.helpers.tiny_engine import train_on
from tests.helpers.train_backend import train_backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def make_critic(folder):
    """Critics with the same random body and head."""

    def build(optimizer=OPTIMIZER, recompute=False, dtype=torch.float32, device="cpu", **kwargs):
        model = build_model(load_config(folder, "value"), dtype=torch.float32, device="cpu")
        model.init_weights(7)
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
        model.to(device, dtype)
        attn_backend = choose_backend("auto", device, dtype)
        more = {"attn_backend": attn_backend, "gradient_checkpointing": recompute}
        return train_backend(model, optimizer, **more, **kwargs)

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
    backend = train_backend(model, None)
    token_rows = [row.tokens for row in make_rows(7)] + [[5]]
    for spec in (WHOLE, MicroBatchSpec(mini_bs=3), MicroBatchSpec(max_tokens_per_mb=30)):
        values, rewards = backend.values(token_rows, spec), backend.rewards(token_rows, spec)
        for tokens, values_of_row, reward in zip(token_rows, values, rewards, strict=True):
            with torch.no_grad():
                outputs = theirs.score(theirs.model(torch.tensor([tokens])).last_hidden_state)[0, :, 0].tolist()
                assert reward == pytest.approx(theirs(torch.tensor([tokens])).logits.item(), abs=1e-4)
            assert values_of_row == pytest.approx([0.0, *outputs[:-1]], abs=1e-4)
    assert (backend.values([], WHOLE), backend.rewards([], WHOLE)) == ([], [])


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
        train_on(make_critic(dp=rank), rows, value_loss_fn, MicroBatchSpec(mini_bs=2))
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
        attend = PackedAttend(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens), "sdpa")
        outputs = (model(tokens, torch.arange(len(tokens)), attend) @ model.score.weight[0]).double()
        for t, masked in enumerate(row.prompt_mask):
            if not masked:
                near = row.values[t] + (outputs[t - 1] - row.values[t]).clamp(-clip, clip)
                errors = torch.stack([outputs[t - 1] - row.returns[t], near - row.returns[t]]).square()
                total = total + 0.5 * errors.max() / n
    total.backward()
    torch.testing.assert_close(backend.flat.grads, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_a_critic_learns_its_targets(make_critic):
    backend, rows = make_critic(recompute=True), critic_rows()
    loss_fn = partial(value_loss_fn, cliprange_value=100.0)
    losses = [train_on(backend, rows, loss_fn, MicroBatchSpec(mini_bs=4))["loss"] for _ in range(30)]
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
