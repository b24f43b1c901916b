"""Packed attention against a float64 loop over rows and heads."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from areno.errors import ConfigError
from areno.kernels import padding
from areno.kernels.attention import choose_backend, varlen_attention, varlen_backward, varlen_forward
from areno.kernels.padding import CuSeqlens
from tests.helpers.attention_rows import ROWS, borders, loop, random_qkv, run_and_compare


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("case", ROWS)
def test_sdpa_is_the_definition(case: str, heads: tuple[int, int]) -> None:
    run_and_compare(case, heads, 8, "sdpa", torch.float32, "cpu")


@pytest.mark.parametrize("backend", ["sdpa", "fixed_order"])
@pytest.mark.parametrize("window", [1, 4, 30, 80])
@pytest.mark.parametrize("case", ROWS)
def test_a_window_is_the_definition(case: str, window: int, backend: str) -> None:
    run_and_compare(case, (4, 2), 8, backend, torch.float32, "cpu", window)


# One sink is far below all scores, one far above: its head gives almost nothing.
SINKS = [0.7, -1.5, -30.0, 20.0]


@pytest.mark.parametrize("backend", ["sdpa", "fixed_order"])
@pytest.mark.parametrize("window", [None, 4, 80])
@pytest.mark.parametrize("case", ROWS)
def test_sinks_are_the_definition(case: str, window: int | None, backend: str) -> None:
    run_and_compare(case, (4, 2), 8, backend, torch.float32, "cpu", window, SINKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["varlen", "flash", "fixed_order", "sdpa"])
@pytest.mark.parametrize("window", [None, 4, 80])
@pytest.mark.parametrize("case", ROWS)
def test_sinks_of_the_cuda_kernels_are_the_definition(case: str, window: int | None, backend: str) -> None:
    if backend == "flash":
        pytest.importorskip("flash_attn")
    run_and_compare(case, (4, 2), 64, backend, torch.bfloat16, "cuda", window, SINKS)


class FlashInFloat64:
    """torch's flash kernels as formulas: forward, and backward from a given output and log-sum-exp. One row."""

    def __init__(self, window: int | None):
        self.window = window

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        n, group = len(q), q.shape[1] // k.shape[1]
        ahead = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (ahead < 0) if self.window is None else (ahead < 0) | (ahead >= self.window)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / q.shape[2] ** 0.5
        return scores.masked_fill(hidden, -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        scores, values = self._scores(q, k), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return out, scores.logsumexp(-1), torch.empty(0), torch.empty(0)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.exp(self._scores(q, k) - log_sum.unsqueeze(-1))
        of_weights = torch.einsum("qhd,khd->hqk", grad, values)
        of_scores = scale * weights * (of_weights - (grad * out).sum(-1).t().unsqueeze(-1))
        of_k, of_v = torch.einsum("hqk,qhd->khd", of_scores, q), torch.einsum("hqk,qhd->khd", weights, grad)
        summed = [x.unflatten(1, (-1, group)).sum(2) for x in (of_k, of_v)]
        return torch.einsum("hqk,khd->qhd", of_scores, keys), *summed


@pytest.mark.parametrize("window", [None, 3])
def test_the_flash_backward_is_exact_with_sinks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: output and gradients, with the unchanged formulas of the kernels, are those of autograd."""
    flash = FlashInFloat64(window)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    exact = [*random_qkv([11], [11], 4, 2, 8), torch.tensor(SINKS, dtype=torch.float64)]
    tested = [x.clone().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    expected = loop(*exact[:3], [11], [11], window, exact[3])
    out = varlen_attention(*tested[:3], CuSeqlens(*[borders([11])] * 2, 11, 11), "varlen", window, tested[3])
    torch.testing.assert_close(out, expected, atol=1e-14, rtol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weights).sum().backward()
    (out * weights).sum().backward()
    for ours, theirs in zip(tested, exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-13, rtol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [1, 4, 30, 80])
@pytest.mark.parametrize("case", ROWS)
def test_a_window_of_the_chosen_cuda_kernel_is_the_definition(case: str, window: int) -> None:
    run_and_compare(case, (4, 2), 64, "varlen", torch.bfloat16, "cuda", window)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("case", ROWS)
def test_the_chosen_cuda_kernel_is_the_definition(case: str, heads: tuple[int, int]) -> None:
    backend = choose_backend("auto", "cuda", torch.bfloat16)
    assert backend == "varlen"
    run_and_compare(case, heads, 64, backend, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize("case", ROWS)
def test_a_backward_pass_that_is_called_by_itself_is_the_definition(case: str, backend: str) -> None:
    if backend == "flash":
        pytest.importorskip("flash_attn")
        run_and_compare(case, (4, 2), 128, backend, torch.bfloat16, "cuda")
    lengths, _ = ROWS[case]
    exact = [x.bfloat16().double().requires_grad_() for x in random_qkv(lengths, lengths, 4, 2, 128)]
    q, k, v = (x.detach().to("cuda", torch.bfloat16) for x in exact)
    expected = loop(*exact, lengths, lengths)
    rows = CuSeqlens(*[borders(lengths, "cuda")] * 2, *[max(lengths)] * 2), backend
    out, saved = varlen_forward(q, k, v, *rows)
    tolerance = {"atol": 4e-2, "rtol": 2e-2}
    torch.testing.assert_close(out.double().cpu(), expected, **tolerance)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    for ours, theirs in zip(varlen_backward(weights.to(out), q, k, v, out, saved, *rows), exact, strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs.grad, **tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ROWS)
def test_sdpa_on_cuda_is_the_definition(case: str) -> None:
    run_and_compare(case, (4, 2), 8, "sdpa", torch.float32, "cuda")


def test_a_change_in_one_row_or_a_later_token_is_not_seen() -> None:
    lengths = [5, 80, 7]
    q, k, v = (x.float() for x in random_qkv(lengths, lengths, 2, 1, 8))
    before = varlen_attention(q, k, v, CuSeqlens(borders(lengths), borders(lengths), 80, 80), "sdpa")
    k[50] += 3.0
    v[50] += 3.0
    after = varlen_attention(q, k, v, CuSeqlens(borders(lengths), borders(lengths), 80, 80), "sdpa")
    changed = (before != after).any(dim=2).any(dim=1)
    assert changed[50:85].all()
    assert not changed[:50].any()
    assert not changed[85:].any()


def test_batches_waste_little() -> None:
    """Short rows share one call whatever their lengths; long ones only with rows of similar length."""
    lengths = [3, 1000, 60, 10, 990, 400, 1]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert sorted(padding._group_by_length(starts, starts)) == [[0, 2, 3, 6], [1, 4], [5]]


def test_choice_of_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("auto", "cpu", torch.float32) == "sdpa"
    assert choose_backend("native", "cpu", torch.float32) == "sdpa"
    assert choose_backend("auto", "cuda", torch.float32) == "sdpa"
    real = importlib.util.find_spec
    for installed in (True, False):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, here=installed: (True if here else None) if name == "flash_attn" else real(name),
        )
        assert choose_backend("auto", "cuda", torch.bfloat16) == "varlen"
        assert choose_backend("native", "cuda:1", torch.bfloat16) == "varlen"
    with pytest.raises(ConfigError, match=r"engine\.attn_backend.*not installed"):
        choose_backend("flash", "cuda", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"engine\.attn_backend.*float32 on cpu"):
        choose_backend("flash", "cpu", torch.float32)
