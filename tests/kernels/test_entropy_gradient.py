"""The entropy with its gradient inside the chunked head, against autograd in float64 over the whole vocabulary."""

from __future__ import annotations

import threading

import pytest
import torch

from areno.kernels.logprobs import VocabSoftmax, selected_logprobs
from areno.kernels.logprobs.entropy import Negentropy
from tests.helpers.interpreted import run_interpreted
from tests.helpers.thread_ranks import ThreadRanks

K, V, D = 23, 37, 8


def inputs(dtype, n_ids=V, scale=1.0):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (scale * torch.randn(n, D, generator=rng, dtype=torch.float64) for n in (K, n_ids))
    upstream = torch.randn(2, K, generator=rng, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, n_ids, (K,), generator=rng), upstream


def expected(hidden, weight, targets, upstream, temperature):
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logq = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    negentropy = (logq.exp() * logq).sum(-1)
    (logq[torch.arange(K), targets] * upstream[0] + negentropy * upstream[1]).sum().backward()
    return negentropy.detach(), hidden.grad, weight.grad


def compare(dtype, tol, keep=10**9, chunk=5, scale=1.0):
    hidden, weight, targets, upstream = inputs(dtype, scale=scale)
    want = expected(hidden, weight, targets, upstream, 0.7)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    how = VocabSoftmax(temperature=0.7, chunk=chunk, keep_bytes=keep)
    logprobs, entropy, found = selected_logprobs(hidden, weight, targets, how, Negentropy())
    (logprobs * upstream[0].to(logprobs.dtype) + found * upstream[1].to(found.dtype)).sum().backward()
    for got, wanted in zip((found, hidden.grad, weight.grad), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=tol, rtol=tol)
    torch.testing.assert_close(-found, entropy, atol=tol, rtol=tol)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_entropy_and_gradients_are_the_formula(dtype, tol):
    compare(dtype, tol)


@pytest.mark.parametrize("kept_rows", [0, 9, K])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_neither_chunks_nor_what_is_kept_matter(kept_rows, chunk):
    compare(torch.float64, 1e-9, keep=2 * kept_rows * V * 8 + 3, chunk=chunk)


def test_a_certain_policy_has_no_entropy_and_a_finite_gradient():
    hidden, weight, targets, _ = inputs(torch.float32, scale=100.0)
    hidden.requires_grad_()
    found = selected_logprobs(hidden, weight, targets, None, Negentropy())[2]
    found.sum().backward()
    assert found.abs().max() < 1e-4
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("n_ids", [37, 5])  # 5 over 4 ranks leaves the last rank with nothing but padding
def test_divided_vocabulary(size, n_ids):
    hidden, weight, targets, upstream = inputs(torch.float64, n_ids)
    want = expected(hidden, weight, targets, upstream, 0.8)
    per_rank = -(-n_ids // size)
    shared, results = ([None] * size, threading.Barrier(size, timeout=200)), [None] * size

    def work(rank):
        first = min(rank * per_rank, n_ids)
        own, mine = hidden.clone().requires_grad_(), weight[first : first + per_rank].clone().requires_grad_()
        how = {"temperature": 0.8, "chunk": 6, "first": first, "all_reduce": ThreadRanks(rank, shared).all_reduce}
        how |= {"keep_bytes": 9 * 16 * per_rank, "most_rows": per_rank}
        logprobs, _, found = selected_logprobs(own, mine, targets, VocabSoftmax(**how), Negentropy())
        (logprobs * upstream[0] + found * upstream[1]).sum().backward()
        results[rank] = (found.detach(), own.grad, mine.grad)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, grad_hidden, _ in results:
        torch.testing.assert_close(found, want[0], atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(grad_hidden, want[1], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(torch.cat([each[2] for each in results]), want[2], atol=1e-9, rtol=1e-9)


def compare_interpreted():
    """Run in a process of its own, since Triton decides at its import whether it interprets."""
    from areno.kernels.logprobs import triton

    triton._BLOCK = 16
    for keep in (0, 2000, 10**6):
        compare(torch.float32, 1e-4, keep=keep)


@pytest.mark.slow
def test_triton_kernels():
    run_interpreted("from tests.kernels.test_entropy_gradient import compare_interpreted; compare_interpreted()")


@pytest.mark.gpu
def test_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    hidden, weight, targets, upstream = inputs(torch.float32)
    want = expected(hidden, weight, targets, upstream, 0.7)
    hidden, weight = hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()
    how = VocabSoftmax(temperature=0.7, chunk=5, keep_bytes=0)
    logprobs, _, found = selected_logprobs(hidden, weight, targets.cuda(), how, Negentropy())
    (logprobs * upstream[0].float().cuda() + found * upstream[1].float().cuda()).sum().backward()
    for got, wanted in zip((found, hidden.grad, weight.grad), want, strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted, atol=1e-4, rtol=1e-4)
