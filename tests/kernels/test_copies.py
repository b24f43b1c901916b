"""Sums of copies against index_add in float64."""

from __future__ import annotations

import pytest
import torch

from areno.kernels.copies import copy_rows, order_of_copies, sum_copies
from tests.helpers.interpreted import run_interpreted

CASES = [(1, 5, 3), (7, 40, 1024), (30, 31, 1030), (4, 0, 8)]


def compare(device: str, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> None:
    for n_rows, n_copies, size in CASES:
        for dtype in dtypes:
            generator = torch.Generator().manual_seed(n_copies)
            places = torch.randint(n_rows, (n_copies,), generator=generator).to(device)
            copies = torch.randn(n_copies, size, generator=generator).to(device, dtype)
            found = sum_copies(copies, *order_of_copies(places, n_rows))
            expected = torch.zeros(n_rows, size, dtype=torch.float64, device=device)
            expected.index_add_(0, places, copies.double())
            assert found.dtype == dtype
            assert found.shape == (n_rows, size)
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-14}[dtype]
            torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_sums_in_plain_torch() -> None:
    compare("cpu", (torch.float32, torch.bfloat16, torch.float64))


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 4)])
@pytest.mark.parametrize("n_copies", [0, 9])
def test_the_gradient_of_copies_is_that_of_index_select(shape: tuple[int, ...], n_copies: int) -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(6, (n_copies,), generator=generator)
    upstream = torch.randn(n_copies, *shape[1:], generator=generator, dtype=torch.float64)
    found = []
    for gather in (copy_rows, lambda x, at: x.index_select(0, at)):
        rows = torch.arange(6.0, dtype=torch.float64).view(6, *[1] * (len(shape) - 1)).expand(shape).requires_grad_()
        copies = gather(rows, places)
        copies.backward(upstream)
        found.append((copies.detach(), rows.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_interpreted_kernel() -> None:
    run_interpreted("from tests.kernels.test_copies import compare; compare('cpu')")


@pytest.mark.gpu
def test_the_kernel_on_the_gpu() -> None:
    compare("cuda")
    places = torch.randint(50, (5000,), device="cuda")
    copies, order = torch.randn(5000, 512, device="cuda"), order_of_copies(places, 50)
    assert torch.equal(sum_copies(copies, *order), sum_copies(copies, *order))
