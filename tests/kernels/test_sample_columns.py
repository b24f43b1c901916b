"""Tokens drawn where each rank has some columns of the logits, against a draw from all of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from areno.kernels.sampling import SamplingFlags
from areno.types import SamplingParams
from tests.helpers.interpreted import run_interpreted
from tests.helpers.slot_samplers import PLAIN, settings_of

BANNED = [SamplingParams(min_new_tokens=4), SamplingParams(min_new_tokens=100, greedy=True)]


def drawn_by(n_ranks: int, logits_BV: Tensor, slots: Tensor, positions: Tensor, samplers: list, flags, span) -> Tensor:
    """What each rank gets, (ranks, 2, B); they run one after another, up to where they need the others."""
    from areno.kernels.sampling.triton import sample_columns

    n_columns = -(-logits_BV.shape[1] // n_ranks)
    # Columns that are no tokens must never be drawn.
    columns = torch.nn.functional.pad(logits_BV, (0, n_columns * n_ranks - logits_BV.shape[1]), value=1e9)
    told: list[list[Tensor]] = []  # by exchange, of each rank
    for exchange in range(3):
        results: list[Tensor] = []
        for rank in range(n_ranks):
            answers = iter(told)

            def every(x: Tensor, answers=answers, results=results) -> Tensor:
                known = next(answers, None)
                if known is None:
                    results.append(x)
                    raise StopIteration
                return torch.stack(known)

            own = columns[:, rank * n_columns : (rank + 1) * n_columns].clone()
            vocab = logits_BV.shape[1]
            draw = partial(sample_columns, own, vocab, slots, positions, samplers[rank].tensors, flags, rank, every)
            try:
                results.append(draw(span=span))
            except StopIteration:
                assert exchange < 2
        told.append(results)
    return torch.stack(told[2])


def compare_columns(device: str) -> None:
    from areno.kernels.sampling.triton import sample_slots

    on_gpu = device == "cuda"
    cases = [(PLAIN + BANNED, 151, 64, 2, texts) for texts in ((), ((0, 70), (75, 140)))]
    if on_gpu:
        rows = (PLAIN + BANNED) * 20
        cases = [(rows, 151_936, 4096, n_ranks, texts) for n_ranks in (2, 4) for texts in ((), ((0, 151_665),))]
    for rows, vocab, span, n_ranks, texts in cases:
        logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(1)) * 3
        logits[1, : vocab // 2 + 9] = -torch.inf
        logits[2, [5, vocab - 1]] = 12.0  # a greedy row takes the first of equals
        logits[:, 7] = 11.0  # a token that would be drawn often, were it not banned
        logits = logits.to(device)
        whole, slots = settings_of(len(rows) + 2, vocab, rows, device, texts)
        samplers = [settings_of(len(rows) + 2, vocab, rows, device, texts)[0] for _ in range(n_ranks)]
        flags = SamplingFlags(n_banned=whole.tensors.banned.shape[1])
        for position in range(3):
            positions = torch.arange(len(rows), device=device) % 6 + position
            expected = sample_slots(logits.clone(), slots, positions, whole.tensors, flags, span=span)
            found = drawn_by(n_ranks, logits, slots, positions, samplers, flags, span)
            assert all(torch.equal(each, found[0]) for each in found)
            assert not texts or all(any(first <= t < end for first, end in texts) for t in found[0, 0].tolist())
            assert (found[0, 0] != expected[0]).sum() <= len(rows) // 100
            same = found[0, 0] == expected[0]
            torch.testing.assert_close(found[0, 1][same], expected[1][same], atol=1e-6, rtol=0)
        logits[0, vocab - 1] = torch.nan
        found = drawn_by(n_ranks, logits, slots, positions, samplers, flags, span)[0]
        assert found[1].isnan().tolist() == [True] + [False] * (len(rows) - 1)
        assert ((found[0] >= 0) & (found[0] < vocab)).all()
    # Of a model that has diverged there is no best token; of 3 ranks, the last one may have no column of a token.
    for vocab, n_ranks in ((127, 2), (4, 3)):
        sampler, slots = settings_of(2, vocab, [SamplingParams(), SamplingParams(greedy=True)], device)
        logits = torch.full((2, vocab), torch.nan, device=device)
        found = drawn_by(n_ranks, logits, slots, slots, [sampler] * n_ranks, SamplingFlags(), 64)
        assert found[:, 1].isnan().all()
        assert ((found[:, 0] >= 0) & (found[:, 0] < vocab)).all()


@pytest.mark.slow
def test_ranks_with_some_columns_draw_as_one_with_all() -> None:
    run_interpreted("from tests.kernels.test_sample_columns import compare_columns; compare_columns('cpu')")


@pytest.mark.gpu
def test_ranks_with_some_columns_draw_as_one_with_all_on_the_gpu() -> None:
    compare_columns("cuda")
