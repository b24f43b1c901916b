"""Tokens drawn from hidden states without stored logits, against a draw from the logits."""

from __future__ import annotations

import pytest
import torch

from areno.kernels.sampling import SamplingFlags, can_sample_hidden
from areno.types import SamplingParams
from tests.helpers.interpreted import run_interpreted
from tests.helpers.slot_samplers import Texts, settings_of

ROWS = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(greedy=True), SamplingParams(temperature=2.0)]


def compare_hidden(device: str, dtype: torch.dtype, n_copies: int, vocab: int, width: int, texts: Texts = ()) -> None:
    from areno.kernels.sampling.reference import sample_slots
    from areno.kernels.sampling.triton_head import sample_hidden

    generator, rows = torch.Generator().manual_seed(0), ROWS * n_copies
    weight = (torch.randn(vocab, width, generator=generator) / width**0.5).to(device, dtype)
    hidden = (torch.randn(len(rows), width, generator=generator) * 3).to(device, dtype)
    if texts:
        weight[texts[-1][1] :] *= 3  # ids without a text would be drawn often
    logits = hidden.float() @ weight.float().T
    (ours, slots), (theirs, _) = (settings_of(len(rows) + 2, vocab, rows, device, texts) for _ in range(2))
    for position in range(3):
        positions = torch.arange(len(rows), device=device) % 6 + position
        found = sample_hidden(hidden, weight, slots, positions, ours.tensors)
        expected = sample_slots(logits, slots, positions, theirs.tensors, SamplingFlags())
        assert not texts or all(any(first <= t < end for first, end in texts) for t in found[0].tolist())
        same = found[0] == expected[0]
        assert (~same).sum() <= len(rows) // 100
        torch.testing.assert_close(found[1][same], expected[1][same], atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.tensors.last_token[slots], found[0].long())
    hidden[1] = torch.nan
    found = sample_hidden(hidden, weight, slots, positions, ours.tensors)
    assert found[1].isnan().tolist() == [False, True] + [False] * (len(rows) - 2)
    assert ((found[0] >= 0) & (found[0] < vocab)).all()


def compare_tiles_by_tma() -> None:
    """The interpreter copies tiles as TMA does."""
    from areno.kernels import backend
    from areno.kernels.sampling import triton_head

    backend.compute_capability = lambda _: (9, 0)
    from_tensor, shapes = triton_head.TensorDescriptor.from_tensor, []
    triton_head.TensorDescriptor.from_tensor = lambda x, tile: shapes.append(x.shape) or from_tensor(x, tile)
    for vocab, width in ((300, 72), (130, 64)):
        compare_hidden("cpu", torch.float16, 17, vocab, width)
        assert shapes[-2:] == [(68, width), (vocab, width)]
    halves = torch.zeros(66, 72, dtype=torch.bfloat16)
    assert not triton_head._can_use_tma(halves, halves[:, :68].contiguous())  # rows of 136 bytes
    assert not triton_head._can_use_tma(halves, halves.T)
    assert not triton_head._can_use_tma(halves.flatten()[4:-68].view(65, 72))


@pytest.mark.slow
def test_tiles_by_tma_give_the_same_draws() -> None:
    run_interpreted("from tests.kernels.test_sample_hidden import compare_tiles_by_tma as compare; compare()")


@pytest.mark.slow
def test_draws_from_hidden_states_are_those_from_logits() -> None:
    run_interpreted(
        "import torch; from tests.kernels.test_sample_hidden import compare_hidden; "
        "compare_hidden('cpu', torch.float32, 1, 300, 40, ((0, 200),)); "
        "compare_hidden('cpu', torch.float32, 1, 300, 40, ((3, 90), (100, 270))); "
        "compare_hidden('cpu', torch.float32, 1, 300, 40); compare_hidden('cpu', torch.float32, 33, 130, 16)"
    )


def test_few_rows_wide_models_and_settings_need_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.kernels.sampling.can_use_triton", lambda x: True)
    hidden = torch.zeros(64, 512, dtype=torch.bfloat16)
    assert can_sample_hidden(hidden, SamplingFlags())
    assert not can_sample_hidden(hidden[:16], SamplingFlags())
    assert not can_sample_hidden(hidden.float(), SamplingFlags())
    assert not can_sample_hidden(torch.zeros(64, 2048, dtype=torch.bfloat16), SamplingFlags())
    for flags in ({"filtered": True}, {"n_banned": 1}, {"penalized": True}, {"masked": True}):
        assert not can_sample_hidden(hidden, SamplingFlags(**flags))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocab", "width"), [(151_936, 384), (1_000, 1_024), (32_001, 100)])
def test_on_the_gpu(dtype: torch.dtype, vocab: int, width: int) -> None:
    for n_copies in (1, 50, 300):
        compare_hidden("cuda", dtype, n_copies, vocab, width)
        compare_hidden("cuda", dtype, n_copies, vocab, width, ((0, vocab - 271),))
