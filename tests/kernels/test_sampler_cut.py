"""Top-k and top-p by search among candidates, against sorting in float64, on logits that make the search hard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreted import run_interpreted

FILTERS = [  # (top_k, top_p); -1 and 1.0 are off
    (1, 1.0),
    (20, 1.0),
    (700, 1.0),
    (-1, 1e-6),
    (-1, 0.5),
    (-1, 0.95),
    (-1, 1 - 1e-7),
    (20, 0.95),
    (700, 0.9),
    (1, 0.5),
]
FEW_FILTERS = [(-1, 0.95), (20, 0.8)]
FEW_ROWS = ["flat", "zipf", "sorted zipf", "ties", "both zeros", "half is -inf"]  # the interpreter is slow


def logits_of(vocab: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    normal = torch.randn(vocab, generator=gen)
    zipf = -torch.log(torch.arange(1, vocab + 1).float())
    position = torch.arange(vocab)
    return {
        "flat": 0.64 * normal,
        "peaked": 4 * normal,
        "zipf": 1.5 * zipf[torch.randperm(vocab, generator=gen)],
        "sorted zipf": 1.2 * zipf,  # all of the best in one span
        "constant": torch.zeros(vocab),
        "ties": (4 * normal).round() / 2,
        "both zeros": torch.where(position % 2 == 0, 0.0, -0.0),
        "half is -inf": normal.where(position > vocab // 2, torch.tensor(-torch.inf)),
        "two are finite": torch.full((vocab,), -torch.inf).index_put(
            (torch.tensor([5, vocab - 1]),), torch.tensor(1.0)
        ),
        "twenty above a tail": torch.where(position % (vocab // 20) == 3, 12.0, 0.0) + 0.01 * normal,
        "far from zero": normal - 1000,
    }


def check_cut(
    device: str, vocab: int, span: int, filters: list[tuple[int, float]], names: list[str] | None = None
) -> None:
    """What `truncate` returns, against the definition. Run in a process of its own where interpreted."""
    from areno.kernels.sampling.reference import SamplingSettings
    from areno.kernels.sampling.triton_truncate import truncate

    cases = [(name, row, k, p) for name, row in logits_of(vocab).items() for k, p in filters]
    cases = [case for case in cases if names is None or case[0] in names]
    n, n_spans = len(cases), -(-vocab // span)
    logits = torch.stack([row for _, row, _, _ in cases]).to(device)
    slots, no = torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    settings = SamplingSettings(
        key=no,
        temperature=torch.ones(n, device=device),
        greedy=no.bool(),
        min_new=no,
        banned=no[:, None],
        top_k=torch.tensor([k for _, _, k, _ in cases], device=device),
        top_p=torch.tensor([p for _, _, _, p in cases], device=device),
        penalty=no.float(),
        counts=None,
        last_token=no,
    )
    spans = torch.nn.functional.pad(logits, (0, n_spans * span - vocab), value=-torch.inf).view(n, n_spans, span)
    tops = spans.max(-1).values
    sums = (spans - tops.clamp(min=-1e30)[:, :, None]).exp().sum(-1)
    kept, equal, bounds = truncate(logits, slots, settings, tops, sums, span)
    again = truncate(logits, slots, settings, tops, sums, span)
    assert all(torch.equal(a, b) for a, b in zip((kept, equal, bounds), again, strict=True))
    among_candidates = {name: [] for name, *_ in cases}
    for i, (name, row, k, p) in enumerate(cases):
        least, n_equal, was_found = bounds[:, i].tolist()
        if p < 0.999 or k > 0:  # else the share left out is less than a sample can tell
            among_candidates[name].append(was_found)
        bits = torch.tensor(least, dtype=torch.int32)
        least = (bits ^ 0x7FFFFFFF if least < 0 else bits).view(torch.float32)
        weights = (row.double() - row.max().double()).exp()
        above, is_equal, p = row > least, row == least, float(torch.tensor(p))
        assert equal[i].sum() == is_equal.sum(), (name, k, p)
        torch.testing.assert_close(kept[i].double().sum().cpu(), weights[above].sum(), rtol=1e-5, atol=1e-12)
        assert 1 <= n_equal <= is_equal.sum() or least == -torch.inf or p > 0.999, (name, k, p)
        n_kept, weight = int(above.sum()) + n_equal, weights[is_equal][:1].sum()
        order = weights.sort(descending=True).values[: k if k > 0 else vocab]
        wanted = p * order.sum()
        if p == 1.0:
            assert n_kept == k, (name, k, p)
        else:  # the fewest whose share reaches p; float32 may take or leave what lies on the border
            mass = weights[above].sum() + n_equal * weight
            slack = 1e-6 * order.sum()
            assert mass >= wanted - slack, (name, k, p)
            assert n_equal == 1 or mass - weight <= wanted + slack, (name, k, p)
            assert n_equal > 1 or weights[above].sum() <= wanted + slack, (name, k, p)
    if vocab > 100_000:
        assert all(all(among_candidates[name]) for name in ("flat", "peaked", "zipf", "far from zero"))
        assert not any(among_candidates["constant"])  # too many candidates: the whole row is searched


@pytest.mark.slow
def test_what_is_kept_is_the_definition_in_the_interpreter() -> None:
    what = "FEW_FILTERS, FEW_ROWS, check_cut"
    run_interpreted(
        f"from tests.kernels.test_sampler_cut import {what}; check_cut('cpu', 9000, 4096, FEW_FILTERS, FEW_ROWS)"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("vocab", "span"), [(151_936, 4096), (32_000, 4096), (3001, 512)])
def test_what_is_kept_is_the_definition_on_the_gpu(vocab: int, span: int) -> None:
    check_cut("cuda", vocab, span, FILTERS)
