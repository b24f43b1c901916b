"""The collision probability inside the chunked head, against float64 over the whole vocabulary."""

from __future__ import annotations

import threading

import pytest
import torch

from areno.kernels.logprobs import VocabSoftmax, selected_logprobs
from areno.kernels.logprobs.collision import Collision
from tests.helpers.interpreted import run_interpreted
from tests.helpers.thread_ranks import ThreadRanks

K, V, D = 23, 37, 8


def inputs(dtype, n_ids=V, scale=1.0):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (scale * torch.randn(n, D, generator=rng, dtype=torch.float64) for n in (K, n_ids))
    expected = torch.softmax(hidden.to(dtype).double() @ weight.to(dtype).double().t() / 0.7, -1).square().sum(-1)
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, n_ids, (K,), generator=rng), expected


def compare(dtype, tol, scale=1.0, device="cpu"):
    hidden, weight, targets, expected = inputs(dtype, scale=scale)
    for chunk in (1, 5, 4096):
        how = VocabSoftmax(temperature=0.7, chunk=chunk)
        with torch.no_grad():
            found = selected_logprobs(hidden.to(device), weight.to(device), targets.to(device), how, Collision())
            plain = selected_logprobs(hidden.to(device), weight.to(device), targets.to(device), how)
        torch.testing.assert_close(found[2].double().cpu(), expected, atol=tol, rtol=tol)
        assert torch.equal(found[0], plain[0])
        assert torch.equal(found[1], plain[1])


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_it_is_the_formula(dtype, tol, scale):
    compare(dtype, tol, scale)


@pytest.mark.parametrize("n_ids", [37, 5])  # 5 over 4 ranks leaves the last rank with nothing but padding
def test_divided_vocabulary(n_ids):
    size = 4
    hidden, weight, targets, expected = inputs(torch.float64, n_ids)
    per_rank = -(-n_ids // size)
    shared, results = ([None] * size, threading.Barrier(size, timeout=200)), [None] * size

    def work(rank):
        first = min(rank * per_rank, n_ids)
        how = {"temperature": 0.7, "chunk": 6, "first": first, "all_reduce": ThreadRanks(rank, shared).all_reduce}
        with torch.no_grad():
            of_rank = weight[first : first + per_rank]
            results[rank] = selected_logprobs(hidden, of_rank, targets, VocabSoftmax(**how), Collision())[2]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results:
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def compare_interpreted():
    """Run in a process of its own, since Triton decides at its import whether it interprets."""
    from areno.kernels.logprobs import triton

    triton._BLOCK = 16
    compare(torch.float32, 1e-5)


@pytest.mark.slow
def test_triton_kernels():
    run_interpreted("from tests.kernels.test_collision import compare_interpreted; compare_interpreted()")


@pytest.mark.gpu
def test_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    compare(torch.float32, 1e-4, device="cuda")
