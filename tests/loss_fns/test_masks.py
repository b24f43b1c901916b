"""Each mask of the policy loss against its paper's rule written as a plain loop in float64: values and gradients."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch

from areno.config.teacher import Divergence
from areno.errors import ConfigError, DataError
from areno.kernels.logprobs import VocabSoftmax, selected_logprobs
from areno.kernels.logprobs.divergence import TopKTeacher
from areno.launch.compose import load
from areno.loss_fns import grpo_loss_fn
from areno.loss_fns.masks import DPPOKL, DPPOTV, DPPOTopKL, DPPOTopTV, PrimeIPO, SAOMask
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from tests.helpers.loss_rows import PRECISIONS, all_trained, pack_of, random_rows, token_weight, trained


def rows_of_another_policy(seed):
    """`old_logprobs` are those before the update, `rollout` those of the policy that sampled."""
    rows, rng = random_rows(seed, spread=0.8), random.Random(seed + 7)
    for row in rows:
        row["outputs"] = [min(value, -0.01) for value in row["outputs"]]
        row["rollout"] = [min(value + rng.gauss(0, 0.3), -0.01) for value in row["old_logprobs"]]
    return rows


def dppo_tv(pi, mu, a, d=0.15):
    return (a > 0 and pi - mu > d) or (a < 0 and pi - mu < -d)


def dppo_kl(pi, mu, a, d=0.05):
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return ((a > 0 and pi > mu) or (a < 0 and pi < mu)) and kl > d


RULES = {
    "dppo_tv": (None, dppo_tv),
    "dppo_kl": (None, dppo_kl),
    "prime_ipo": (None, lambda pi, mu, a: abs(pi - mu) > 0.3),
    "sao": (None, lambda pi, mu, a: not 0.2 < pi / mu < 4.0),
    "dppo_tv, other": (DPPOTV(threshold=0.05), partial(dppo_tv, d=0.05)),
    "dppo_kl, other": (DPPOKL(threshold=0.01), partial(dppo_kl, d=0.01)),
    "prime_ipo, other": (PrimeIPO(threshold=0.1), lambda pi, mu, a: abs(pi - mu) > 0.1),
    "sao, other": (SAOMask(eps_low=0.2, eps_high=0.3), lambda pi, mu, a: not 0.8 < pi / mu < 1.3),
}


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("weighted", [False, True])
def test_masks(name, dtype, tol, reduction, weighted):
    mask, is_masked = RULES[name]
    n_masked = n_tokens = 0
    for seed in range(6):
        rows, loss, grads = rows_of_another_policy(seed), 0.0, []
        for row in rows:
            grad = [0.0] * len(row["mask"])
            for t in trained(row):
                lp, a = row["outputs"][t], row["advantages"][t]
                masked = is_masked(math.exp(lp), math.exp(row["rollout"][t]), a)
                n_masked, n_tokens = n_masked + masked, n_tokens + 1
                if not masked:
                    share = token_weight(rows, row, reduction, 10) * (row["weights"][t] if weighted else 1)
                    grad[t] = -share * math.exp(lp - row["old_logprobs"][t]) * a
                    loss += grad[t]
            grads += grad
        pack, outputs = pack_of(rows, weighted=weighted, dtype=dtype)
        pack.rollout_logprobs = torch.tensor([value for row in rows for value in row["rollout"]], dtype=dtype)
        how = {"surrogate": "unclipped", "reduction": reduction, "norm_length": 10}
        found, stats = grpo_loss_fn(pack, outputs, mask=mask or name, **how)
        found.backward()
        assert found.item() == pytest.approx(loss, abs=tol, rel=tol)
        torch.testing.assert_close(outputs.grad, torch.tensor(grads, dtype=dtype), atol=tol, rtol=tol)
        count = sum(
            is_masked(math.exp(lp), math.exp(mu), a)
            for lp, mu, a in zip(*(all_trained(rows, key) for key in ("outputs", "rollout", "advantages")), strict=True)
        )
        assert stats["masked_frac"].item() == pytest.approx(count / len(all_trained(rows, "outputs")))
    assert 0 < n_masked < n_tokens


@pytest.mark.parametrize("mask", ["dppo_tv", "dppo_kl", "prime_ipo", "sao"])
def test_fresh_samples_have_the_gradient_of_grpo(mask):
    """Where pi = mu, nothing is masked; to the bit."""
    rows = random_rows(spread=0.0)
    rows[0]["outputs"] = rows[0]["old_logprobs"] = [0.0] * 5  # certain tokens
    (pack, one), (_, other) = pack_of(rows), pack_of(rows)
    pack.rollout_logprobs = pack.old_logprobs
    grpo_loss_fn(pack, one)[0].backward()
    loss, stats = grpo_loss_fn(pack, other, surrogate="unclipped", mask=mask)
    loss.backward()
    assert stats["masked_frac"] == 0
    assert torch.equal(one.grad, other.grad)


def topk_divergence(pi, mu, sampled, k, kind):
    """Of two distributions over a vocabulary: the k likeliest tokens under mu, the sampled one, and the rest."""
    own = {*sorted(range(len(mu)), key=lambda v: -mu[v])[:k], sampled}
    pairs = [(pi[v], mu[v]) for v in own]
    pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
    if kind == "tv":
        return sum(abs(p - q) for p, q in pairs) / 2
    return sum(q * math.log(q / p) for p, q in pairs)


@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
@pytest.mark.parametrize(("kind", "k", "d"), [("tv", 3, 0.05), ("tv", 1, 0.1), ("kl", 3, 0.02), ("kl", 6, 0.05)])
def test_topk_masks(kind, k, d, dtype, tol):
    """From hidden states to the gradient: the head computes the divergence from lists of the rollout."""
    mask = {"tv": DPPOTopTV, "kl": DPPOTopKL}[kind](top_k=k, threshold=d)
    rows, rng = random_rows(), torch.Generator().manual_seed(k)
    pack, _ = pack_of(rows, dtype=dtype)
    n, n_ids = len(pack.tokens), 9
    hidden, weight = torch.randn(n, 5, generator=rng).double(), torch.randn(n_ids, 5, generator=rng).double()
    mu = torch.softmax((hidden + 0.3 * torch.randn(n, 5, generator=rng)) @ weight.t() / 0.8, -1)
    tokens = torch.multinomial(mu, 1, generator=rng)[:, 0]
    best = mu.topk(k).indices
    is_listed = (best == tokens[:, None]).any(1, keepdim=True)
    assert 0 < is_listed.sum() < n
    listed = torch.cat((best, tokens[:, None].masked_fill(is_listed, -1)), 1)
    old = mu.log().gather(1, tokens[:, None])[:, 0]
    pack.rollout_logprobs = pack.old_logprobs = old.to(dtype)

    leaf = hidden.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf @ weight.t() / 0.8, -1)
    losses, masked = [], []
    for t in pack.trained_T.tolist():
        pi, a, own = logprobs[t].exp().tolist(), pack.advantages[t].item(), logprobs[t, tokens[t]]
        leaves = (a > 0 and own > old[t]) or (a < 0 and own < old[t])
        masked.append(bool(leaves) and topk_divergence(pi, mu[t].tolist(), int(tokens[t]), k, kind) > d)
        losses.append(0 * own if masked[-1] else -(own - old[t]).exp() * a)
    expected = sum(losses) / len(losses)
    expected.backward()
    assert 0 < sum(masked) < len(masked)

    own_leaf = hidden.to(dtype).requires_grad_()
    teacher = TopKTeacher(listed, mu.log().gather(1, listed.clamp(min=0)).to(dtype), Divergence(mask.divergence))
    found, _, pack.divergence = selected_logprobs(own_leaf, weight.to(dtype), tokens, VocabSoftmax(0.8), teacher)
    loss, stats = grpo_loss_fn(pack, found, mask=mask, surrogate="unclipped", reduction="token_mean")
    loss.backward()
    assert stats["masked_frac"].item() == pytest.approx(sum(masked) / len(masked))
    assert loss.item() == pytest.approx(expected.item(), abs=tol)
    torch.testing.assert_close(own_leaf.grad, leaf.grad.to(dtype), atol=tol, rtol=tol)


@pytest.mark.parametrize("mask", ["dppo_topk_tv", "dppo_topk_kl"])
def test_fresh_samples_have_the_gradient_of_grpo_with_topk_masks(mask):
    (pack, one), (_, other) = pack_of(random_rows(spread=0.0)), pack_of(random_rows(spread=0.0))
    pack.rollout_logprobs, pack.divergence = pack.old_logprobs, torch.zeros_like(pack.old_logprobs)
    grpo_loss_fn(pack, one)[0].backward()
    loss, stats = grpo_loss_fn(pack, other, surrogate="unclipped", mask=mask)
    loss.backward()
    assert stats["masked_frac"] == 0
    assert torch.equal(one.grad, other.grad)


def test_a_mask_and_the_kl():
    """The KL of a masked token counts."""
    rows = rows_of_another_policy(0)
    pack, outputs = pack_of(rows)
    pack.rollout_logprobs = pack.old_logprobs - 5.0
    loss, stats = grpo_loss_fn(pack, outputs, mask="sao", kl_coef=0.5)
    assert stats["masked_frac"] == 1
    assert loss.item() == pytest.approx(0.5 * stats["kl_loss"].item())


def test_micro_batches_have_the_masks_of_the_whole():
    rows = rows_of_another_policy(1)
    n_rows, n_tokens = sum(any(row["mask"]) for row in rows), len(all_trained(rows, "outputs"))
    whole, parts = 0.0, 0.0
    for chosen in ([rows], [rows[:2], rows[2:3], rows[3:]]):
        parts = 0.0
        for part in chosen:
            pack, outputs = pack_of(part, step_rows=n_rows, step_tokens=n_tokens)
            pack.rollout_logprobs = torch.tensor([value for row in part for value in row["rollout"]]).double()
            parts += grpo_loss_fn(pack, outputs, mask="dppo_tv", surrogate="unclipped")[0].item()
        whole = whole or parts
    assert parts == pytest.approx(whole, abs=1e-12)


def test_errors_of_masks():
    pack, outputs = pack_of(random_rows())
    with pytest.raises(DataError, match=r"TrainSequence\.logprobs"):
        grpo_loss_fn(pack, outputs, mask="sao")
    pack.rollout_logprobs = pack.old_logprobs
    with pytest.raises(DataError, match="divergence"):
        grpo_loss_fn(pack, outputs, mask="dppo_topk_kl")
    with pytest.raises(ValueError, match="mask is 'ipo'; expected dppo_tv"):
        grpo_loss_fn(pack, outputs, mask="ipo")
    with pytest.raises(ConfigError, match=r"dppo_tv\.threshold.*is 0\.2, but mask is sao; set mask to dppo_tv"):
        GRPOActorConfig(path="folder", mask="sao", dppo_tv=DPPOTV(threshold=0.2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["teacher.path=folder", "teacher.loss_type=reverse_kl"], "the teacher's divergence takes its place"),
        (["actor.entropy_bonus.coef=0.1"], "its passes give the entropy no gradient"),
        (["agent.fn=agent.py"], "the turns of agents do not bring these tokens"),
    ],
)
def test_topk_masks_need_passes_and_tokens_of_their_own(settings, words):
    variant = "variant=dppo_topk_kl"
    with pytest.raises(ConfigError, match=f"actor.mask: is dppo_topk_kl.*{words}"):
        load(GRPOConfig, "quickstart", [variant, *settings])
    assert load(GRPOConfig, "quickstart", [variant]).divergence.kind == "forward_kl"
