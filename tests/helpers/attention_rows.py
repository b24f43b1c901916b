"""Random rows for attention over packed sequences, compared with a loop in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from areno.kernels.attention import varlen_attention
from areno.kernels.padding import CuSeqlens

ROWS = {
    "one": ([9], [9]),
    "equal": ([6, 6, 6], [6, 6, 6]),
    "ragged": ([3, 100, 1, 40, 3, 90, 2], [3, 100, 1, 40, 3, 90, 2]),
    "tails": ([1, 5, 5, 1, 3], [8, 11, 11, 8, 4]),
    "mixed": ([4, 2, 7, 1, 70], [4, 9, 7, 1, 90]),
    "empty rows": ([4, 0, 3, 0], [4, 0, 3, 5]),
    "single queries": ([1, 1, 1], [4, 9, 1]),
}


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: list[int],
    lengths_k: list[int],
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, one query at a time: softmax over its row's keys up to its own position, counted from the end.

    The sink of a head is one more score, without a value.
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    start_q = start_k = 0
    for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
        for i in range(n_q):
            end = start_k + n_k - n_q + i + 1
            seen = slice(start_k if window is None else max(start_k, end - window), end)
            for head in range(q.shape[1]):
                scores = k[seen, head // group] @ q[start_q + i, head] / math.sqrt(q.shape[2])
                n_seen = len(scores)
                scores = scores if sinks is None else torch.cat((scores, sinks[head : head + 1]))
                out[start_q + i, head] = scores.softmax(0)[:n_seen] @ v[seen, head // group]
        start_q, start_k = start_q + n_q, start_k + n_k
    return out


def random_qkv(lengths_q: list[int], lengths_k: list[int], heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths_q), heads), (sum(lengths_k), kv_heads), (sum(lengths_k), kv_heads)]
    return [torch.randn(n, h, dim, generator=generator, dtype=torch.float64) for n, h in shapes]


def borders(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def run_and_compare(
    case: str,
    heads: tuple[int, int],
    dim: int,
    backend: str,
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
    sinks: list[float] | None = None,
) -> None:
    """Output and gradients of `varlen_attention` next to those of the loop, both from inputs rounded to `dtype`."""
    lengths_q, lengths_k = ROWS[case]
    given = random_qkv(lengths_q, lengths_k, *heads, dim)
    if sinks is not None:
        given.append(torch.tensor(sinks, dtype=torch.float64))
    exact = [x.to(dtype).double().requires_grad_() for x in given]
    tested = [x.detach().to(device=device, dtype=dtype).requires_grad_() for x in exact]
    expected = loop(*exact[:3], lengths_q, lengths_k, window, *exact[3:])
    rows = CuSeqlens(borders(lengths_q, device), borders(lengths_k, device), max(lengths_q), max(lengths_k))
    out = varlen_attention(*tested[:3], rows, backend, window, *tested[3:])
    tolerance = {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-2, "rtol": 2e-2}
    torch.testing.assert_close(out.double().cpu(), expected, **tolerance)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    (out * weights.to(out)).sum().backward()
    for ours, theirs in zip(tested, exact, strict=True):
        torch.testing.assert_close(ours.grad.double().cpu(), theirs.grad, **tolerance)
