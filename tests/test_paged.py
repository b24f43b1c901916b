"""Paged decode attention: the torch form against each row alone, the Triton kernel against the torch form."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areno.kernels.paged import paged_attention, paged_attention_reference

SHAPES = [  # query heads, key heads, head dim, page size
    (4, 2, 64, 16),
    (8, 8, 32, 4),
    (6, 1, 24, 7),
    (16, 2, 128, 16),
]
LENGTHS = [1, 5, 16, 17, 64, 65, 150]


def make_case(
    heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows of LENGTHS with their pages in random order; what lies outside a row's own positions is huge."""
    gen = torch.Generator().manual_seed(dim)
    n_rows = len(LENGTHS)
    width = -(-max(LENGTHS) // page_size) + 2
    n_pages = n_rows * width
    pages = torch.full((2, n_pages, page_size, kv_heads, dim), 1e3)
    slots = torch.randperm(n_rows + 3, generator=gen)[:n_rows]
    table = torch.zeros(n_rows + 3, width, dtype=torch.int32)
    table[slots] = torch.randperm(n_pages, generator=gen).view(n_rows, width).int()
    for slot, length in zip(slots.tolist(), LENGTHS, strict=True):
        for position in range(length):
            page = table[slot, position // page_size]
            pages[:, page, position % page_size] = torch.randn(2, kv_heads, dim, generator=gen)
    q = torch.randn(n_rows, heads, dim, generator=gen)
    return (
        q.to(device, dtype),
        pages.to(device, dtype),
        table.to(device),
        slots.to(device),
        torch.tensor(LENGTHS, device=device),
    )


def row_by_row(q: Tensor, pages: Tensor, table: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    """softmax(q k / sqrt(C)) v in float64, one row and one head at a time."""
    out = torch.empty(q.shape, dtype=torch.float64)
    page_size, group = pages.shape[2], q.shape[1] // pages.shape[3]
    for row, length in enumerate(lengths.tolist()):
        places = [(int(table[slots[row], n // page_size]), n % page_size) for n in range(length)]
        k = torch.stack([pages[0, page, offset] for page, offset in places]).double()
        v = torch.stack([pages[1, page, offset] for page, offset in places]).double()
        for head in range(q.shape[1]):
            scores = k[:, head // group] @ q[row, head].double() / q.shape[2] ** 0.5
            out[row, head] = scores.softmax(0) @ v[:, head // group]
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_attention_over_the_row(shape: tuple[int, int, int, int]) -> None:
    case = make_case(*shape)
    expected = row_by_row(*case)
    for max_len in (max(LENGTHS), max(LENGTHS) + 3, None):
        torch.testing.assert_close(paged_attention(*case, max_len).double(), expected, atol=1e-5, rtol=1e-5)


def compare_triton(device: str) -> None:
    """Run in a process of its own under the interpreter, which is slow and so gets less, or on the GPU."""
    from areno.kernels import paged_triton

    on_gpu = device == "cuda"
    for shape in SHAPES if on_gpu else SHAPES[1:3]:
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 4e-3)):
            case = make_case(*shape, dtype=dtype, device=device)
            expected = paged_attention_reference(*(t.float() if t.is_floating_point() else t for t in case))
            for n_splits in (1, 4, 8) if on_gpu else (4,):
                got = paged_triton.paged_attention(*case, n_splits=n_splits)
                assert got.dtype == dtype
                torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(
                paged_triton.paged_attention(*case).float(), expected, atol=tolerance, rtol=tolerance
            )


def test_triton_kernel_in_the_interpreter_is_the_reference() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    # Whether Triton interprets is decided when it is imported.
    code = "from tests.test_paged import compare_triton; compare_triton('cpu')"
    root = Path(__file__).parents[1]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=200)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter cannot loop under this numpy (Triton 3.6 under 2.5)")
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_triton_kernel_on_the_gpu_is_the_reference() -> None:
    compare_triton("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_on_the_gpu_is_attention_over_the_row(shape: tuple[int, int, int, int]) -> None:
    case = make_case(*shape, dtype=torch.bfloat16, device="cuda")
    expected = row_by_row(*(tensor.cpu() for tensor in case))
    torch.testing.assert_close(paged_attention(*case, None).double().cpu(), expected, atol=3e-2, rtol=3e-2)
