"""Digests of matrices by the kernel: the same bits as in plain torch."""

from __future__ import annotations

import pytest
import torch

from areno.kernels.digests import matrix_digests, reference
from tests.helpers.interpreted import run_interpreted


def compare(device: str, more: tuple[tuple[int, int, int], ...] = ()) -> None:
    for shape in [(0, 4, 8), (1, 1, 1), (3, 7, 1024), (2, 8, 1000), *more]:
        generator = torch.Generator().manual_seed(shape[1])
        words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
        assert torch.equal(matrix_digests(words.to(device)).cpu(), reference.matrix_digests(words))


def test_the_interpreted_kernel() -> None:
    run_interpreted("from tests.kernels.test_digests import compare; compare('cpu')")


@pytest.mark.gpu
def test_the_kernel_on_the_gpu() -> None:
    compare("cuda", ((600, 512, 1024),))
