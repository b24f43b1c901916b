"""The chunked head against a plain float64 softmax over the whole vocabulary: values, entropy and gradients."""

from __future__ import annotations

import threading

import pytest
import torch

from areno.kernels.logprobs import VocabSoftmax, selected_logprobs
from tests.helpers.interpreted import run_interpreted
from tests.helpers.thread_ranks import ThreadRanks

K, V, D = 23, 37, 8


def inputs(dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(K, D, generator=rng, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=rng, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, V, (K,), generator=rng)
    upstream = torch.randn(K, generator=rng, dtype=torch.float64)
    return hidden, weight, targets, upstream


def plain(hidden, weight, targets, upstream, temperature):
    """Everything in float64 through autograd's own softmax."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    chosen = logp[torch.arange(K), targets]
    (chosen * upstream).sum().backward()
    return chosen.detach(), -(logp.exp() * logp).sum(-1).detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 5, 23, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_equals_the_full_softmax(chunk, temperature, dtype, tol):
    hidden, weight, targets, upstream = inputs(dtype)
    expected = plain(hidden, weight, targets, upstream, temperature)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = selected_logprobs(hidden, weight, targets, VocabSoftmax(temperature=temperature, chunk=chunk))
    assert logprobs.dtype == entropy.dtype == torch.promote_types(dtype, torch.float32)
    assert not entropy.requires_grad
    (logprobs * upstream.to(logprobs.dtype)).sum().backward()
    assert weight.grad.dtype == dtype
    for got, want in zip((logprobs, entropy, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=tol, rtol=tol)


@pytest.mark.parametrize("rows", [0, 1, 9, K])
def test_how_much_is_held_for_the_backward_pass_does_not_matter(rows):
    hidden, weight, targets, upstream = inputs(torch.float64)
    expected = plain(hidden, weight, targets, upstream, 0.7)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = selected_logprobs(
        hidden, weight, targets, VocabSoftmax(temperature=0.7, chunk=4, keep_bytes=rows * V * hidden.element_size() + 3)
    )
    (logprobs * upstream).sum().backward()
    for got, want in zip((logprobs, entropy, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def compare_interpreted():
    """Run in a process of its own, since Triton decides at its import whether it interprets."""
    from areno.kernels.logprobs import triton

    triton._BLOCK = 16
    for dtype, tol, keep in ((torch.float32, 2e-5, 0), (torch.float32, 2e-5, 2000), (torch.float16, 2e-2, 10**6)):
        hidden, weight, targets, upstream = inputs(dtype)
        expected = plain(hidden, weight, targets, upstream, 0.7)
        hidden.requires_grad_()
        weight.requires_grad_()
        logprobs, entropy = selected_logprobs(hidden, weight, targets, VocabSoftmax(temperature=0.7, keep_bytes=keep))
        (logprobs * upstream).sum().backward()
        for got, want in zip((logprobs, entropy, hidden.grad, weight.grad), expected, strict=True):
            torch.testing.assert_close(got.double(), want, atol=tol, rtol=tol)
    logits = torch.randn(3, 5)
    seen = triton.softmax_statistics(logits, torch.tensor([6, 7, 20]), 4, 0.5)  # the last target is another rank's
    best = (logits * 2).amax(-1)
    torch.testing.assert_close(seen[0], best)
    torch.testing.assert_close(
        seen[3], torch.stack([logits[0, 2] * 2 - best[0], logits[1, 3] * 2 - best[1], best[0] * 0])
    )


def test_weight_gradient_can_be_added_to_a_buffer():
    hidden, weight, targets, upstream = inputs()
    expected = plain(hidden, weight, targets, upstream, 1.0)[3]
    hidden.requires_grad_()
    weight.requires_grad_()
    buffer = torch.ones(V, D)
    logprobs, _ = selected_logprobs(hidden, weight, targets, VocabSoftmax(temperature=1.0, chunk=7, weight_grad=buffer))
    (logprobs * upstream).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(buffer, 1 + expected.float(), atol=2e-5, rtol=2e-5)


def test_large_logits_stay_finite():
    hidden, weight, targets, _ = inputs()
    hidden = (hidden * 1e4).requires_grad_()
    logprobs, entropy = selected_logprobs(hidden, weight, targets, VocabSoftmax(temperature=1.0))
    logprobs.sum().backward()
    assert all(torch.isfinite(x).all() for x in (logprobs, entropy, hidden.grad))
    assert (entropy >= -1e-5).all()


def test_no_positions_give_empty_results_and_zero_gradients():
    hidden, weight, targets, _ = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = selected_logprobs(hidden[:0], weight, targets[:0], VocabSoftmax(temperature=1.0))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [37, 9, 5])  # 5 over 4 ranks leaves the last rank with nothing but padding
def test_divided_and_padded_vocabulary(size, vocab_size):
    hidden, weight, targets, upstream = inputs(torch.float64)
    weight, targets = weight[:vocab_size], targets % vocab_size
    expected = plain(hidden, weight, targets, upstream, 0.8)
    per_rank = -(-vocab_size // size)
    padded = torch.cat([weight, torch.full((per_rank * size - vocab_size, D), 50.0, dtype=torch.float64)])
    shared, results = ([None] * size, threading.Barrier(size, timeout=200)), [None] * size

    def work(rank):
        mine = padded[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
        x = hidden.clone().requires_grad_()
        first = min(rank * per_rank, vocab_size)
        n_valid = min(per_rank, vocab_size - first)
        all_reduce = ThreadRanks(rank, shared).all_reduce if size > 1 else None
        how = {"keep_bytes": 9 * 8 * per_rank, "most_rows": per_rank}  # 9 positions
        logprobs, entropy = selected_logprobs(
            x,
            mine[:n_valid],
            targets,
            VocabSoftmax(temperature=0.8, chunk=6, first=first, all_reduce=all_reduce, **how),
        )
        grads = torch.autograd.grad((logprobs * upstream).sum(), (x, mine))
        results[rank] = (logprobs.detach(), entropy, *grads)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        for got, want in zip(result[:3], expected[:3], strict=True):
            torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)
    weight_grad = torch.cat([result[3] for result in results])
    torch.testing.assert_close(weight_grad[:vocab_size], expected[3], atol=1e-10, rtol=1e-10)
    assert not weight_grad[vocab_size:].any()


def test_interpreted_kernels_equal_the_full_softmax():
    run_interpreted("from tests.kernels.test_logprobs import compare_interpreted; compare_interpreted()", timeout=200)


@pytest.mark.gpu
@pytest.mark.parametrize("keep_bytes", [0, 10**6])
def test_bf16_products_are_kept_in_fp32_on_cuda(keep_bytes):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    hidden, weight, targets, upstream = (x.cuda() for x in inputs(torch.bfloat16))
    expected = plain(hidden, weight, targets, upstream, 0.6)
    hidden.requires_grad_()
    weight.requires_grad_()
    buffer = torch.zeros(V, D, device="cuda")
    logprobs, entropy = selected_logprobs(
        hidden, weight, targets, VocabSoftmax(temperature=0.6, chunk=9, weight_grad=buffer, keep_bytes=keep_bytes)
    )
    (logprobs * upstream).sum().backward()
    # Only gradients see bf16 rounding.
    for got, want, tol in zip((logprobs, entropy, hidden.grad, buffer), expected, (1e-4, 1e-4, 0.1, 0.1), strict=True):
        torch.testing.assert_close(got.double(), want, atol=tol, rtol=tol)
