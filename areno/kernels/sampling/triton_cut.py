# The language of Triton kernels is not Python's, whatever it looks like to a type checker:
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Top-k and top-p without sorting: the least logit of each row that is kept.

`_cut_kernel` finds it two bits at a time, by counting or summing what reaches a candidate. `_keep_kernel` then sums for
each span of the row what is kept. Shape letters as in `reference.py`; S spans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.sampling.reference import SamplingSettings

_LOG2_E = tl.constexpr(1.4426950408889634)
_LAST_INT = tl.constexpr(2147483647)


def cut(
    logits_BV: Tensor,
    slots_B: Tensor,
    settings: SamplingSettings,
    tops_BS: Tensor,
    sums_BS: Tensor,
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What top-k and top-p leave of each row.

    tops_BS, sums_BS: float32, of each span the maximum and the sum of exp((x - maximum) / temperature).

    Returns `kept_BS`, float32: the sum of the weights above the least kept logit, relative to the row's maximum;
    `equal_BS`, int32: how many are equal to it; and `bounds_2B`, int32: the least kept logit as an ordered number, and
    how many of its equals are kept. Rows that cut nothing have -1 there, and no more.
    """
    n_rows, vocab = logits_BV.shape
    n_spans = tops_BS.shape[1]
    kept_BS, equal_BS = torch.empty_like(tops_BS), torch.empty_like(tops_BS, dtype=torch.int32)
    bounds_2B = torch.empty((2, n_rows), dtype=torch.int32, device=logits_BV.device)
    row = (logits_BV, slots_B, settings.temperature)
    shape = {"PADDED_SPANS": triton.next_power_of_2(n_spans), "SPAN": span}
    sizes = (logits_BV.stride(0), vocab, n_spans)
    _cut_kernel[(n_rows,)](
        *row, settings.top_k, settings.top_p, tops_BS, sums_BS, bounds_2B, *sizes, **shape, num_warps=16,
    )  # fmt: skip
    _keep_kernel[(n_rows, n_spans)](*row, tops_BS, kept_BS, equal_BS, bounds_2B, *sizes, **shape, num_warps=8)
    return kept_BS, equal_BS, bounds_2B


@triton.jit
def ordered(x):
    """int32 numbers in the order of the floats (of the two zeros, as one)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _LAST_INT, bits)


@triton.jit
def from_ordered(number):
    return tl.where(number < 0, number ^ _LAST_INT, number).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(number, top, rate):
    return tl.exp2((from_ordered(number) - top) * rate).to(tl.float64)


@triton.jit
def _measure(x, top, rate, inside, COUNT: tl.constexpr):
    """What an entry adds: 1 (COUNT), or its weight."""
    if COUNT:
        return tl.where(inside, 1.0, 0.0)
    else:
        return tl.where(inside, tl.exp2((x - top) * rate), 0.0)


@triton.jit
def _least_kept(logits_ptr, vocab, top, rate, wanted, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """The largest number such that the entries which reach it measure `wanted` (float64) or more."""
    lane = tl.arange(0, SPAN)
    least = tl.full([], -2147483648, tl.int64)
    for step in range(16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * step)
        low, mid, high = least + unit, least + 2 * unit, least + 3 * unit
        # Sums of up to 2^24 counts are exact in float32; those of weights are rounded like any sum.
        low_sums = tl.zeros([SPAN], tl.float32)
        mid_sums = tl.zeros([SPAN], tl.float32)
        high_sums = tl.zeros([SPAN], tl.float32)
        for first in range(0, vocab, SPAN):
            inside = first + lane < vocab
            x = tl.load(logits_ptr + first + lane, mask=inside, other=float("-inf"))
            number = ordered(x)
            measure = _measure(x, top, rate, inside, COUNT)
            low_sums += tl.where(number >= low.to(tl.int32), measure, 0.0)
            mid_sums += tl.where(number >= mid.to(tl.int32), measure, 0.0)
            high_sums += tl.where(number >= high.to(tl.int32), measure, 0.0)
        reached = (tl.sum(low_sums.to(tl.float64), axis=0) >= wanted).to(tl.int64)
        reached += (tl.sum(mid_sums.to(tl.float64), axis=0) >= wanted).to(tl.int64)
        reached += (tl.sum(high_sums.to(tl.float64), axis=0) >= wanted).to(tl.int64)
        least += reached * unit
    return least.to(tl.int32)


@triton.jit
def _above(logits_ptr, vocab, top, rate, least, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """float64: the measure of the entries above `least`."""
    lane = tl.arange(0, SPAN)
    sums = tl.zeros([SPAN], tl.float32)
    for first in range(0, vocab, SPAN):
        inside = first + lane < vocab
        x = tl.load(logits_ptr + first + lane, mask=inside, other=float("-inf"))
        sums += tl.where(ordered(x) > least, _measure(x, top, rate, inside, COUNT), 0.0)
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit
def _cut_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    tops_ptr,
    sums_ptr,
    bounds_ptr,
    row_stride,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    rate = _LOG2_E / tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot).to(tl.float64)
    has_k = (top_k >= 1) & (top_k < vocab)
    has_p = top_p < 1.0
    logits_ptr += row * row_stride
    least = tl.full([], -2147483648, tl.int32)
    n_equal = tl.full([], -1, tl.int32)
    if has_k | has_p:
        span = tl.arange(0, PADDED_SPANS)
        tops = tl.load(tops_ptr + row * n_spans + span, mask=span < n_spans, other=float("-inf"))
        sums = tl.load(sums_ptr + row * n_spans + span, mask=span < n_spans, other=0.0).to(tl.float64)
        top = tl.max(tops, axis=0)
        total = tl.sum(sums * tl.exp2((tops - top) * rate).to(tl.float64), axis=0)
        n_equal += vocab + 1
        if has_k:
            wanted = top_k.to(tl.float64)
            least = _least_kept(logits_ptr, vocab, top, rate, wanted, True, SPAN)
            n_equal = (wanted - _above(logits_ptr, vocab, top, rate, least, True, SPAN)).to(tl.int32)
            total = _above(logits_ptr, vocab, top, rate, least, False, SPAN)
            total += n_equal.to(tl.float64) * _weight_of(least, top, rate)
        if has_p:
            wanted = total * top_p
            nucleus = _least_kept(logits_ptr, vocab, top, rate, wanted, False, SPAN)
            missing = wanted - _above(logits_ptr, vocab, top, rate, nucleus, False, SPAN)
            if nucleus >= least:
                weight = _weight_of(nucleus, top, rate)
                # Of the equals as many as the share takes, at least one; no more than k leaves.
                n_wanted = tl.maximum(tl.ceil(tl.where(weight > 0, missing / weight, 1.0)), 1.0).to(tl.int32)
                n_equal = tl.where(nucleus > least, n_wanted, tl.minimum(n_wanted, n_equal))
                least = nucleus
    tl.store(bounds_ptr + row, least)
    tl.store(bounds_ptr + tl.num_programs(0) + row, n_equal)


@triton.jit
def _keep_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    tops_ptr,
    kept_ptr,
    equal_ptr,
    bounds_ptr,
    row_stride,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(bounds_ptr + tl.num_programs(0) + row) >= 0:
        span_S = tl.arange(0, PADDED_SPANS)
        tops = tl.load(tops_ptr + row * n_spans + span_S, mask=span_S < n_spans, other=float("-inf"))
        top = tl.max(tops, axis=0)
        rate = _LOG2_E / tl.load(temperature_ptr + tl.load(slots_ptr + row))
        least = tl.load(bounds_ptr + row)
        index = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        inside = index < vocab
        x = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=float("-inf"))
        number = ordered(x)
        cell = row * n_spans + tl.program_id(1)
        tl.store(kept_ptr + cell, tl.sum(tl.where((number > least) & inside, tl.exp2((x - top) * rate), 0.0), axis=0))
        tl.store(equal_ptr + cell, tl.sum(((number == least) & inside).to(tl.int32), axis=0))
