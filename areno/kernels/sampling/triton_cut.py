# The language of Triton kernels is not Python's, whatever it looks like to a type checker:
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Top-k and top-p without sorting: the least logit of each row that is kept.

`_cut_kernel` counts the entries of a row by their distance below the row's maximum, in bins that are 1/64 of their
distance wide. The counts say in which few bins the least kept logit is. A second pass sums what is above these bins and
copies the few hundred logits inside, among which the exact number is found, four bits at a time. Where they are too
many, as in a row of equal logits, the number is found in the whole row, two bits at a time. `_keep_kernel` then sums
for each span of the row what is kept.

Shape letters as in `reference.py`; S spans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.sampling.reference import SamplingSettings

CANDIDATES = 2048  # logits among which the least kept one is searched at once
_BINS = tl.constexpr(1024)
_FIRST_BIN = tl.constexpr((127 - 9) << 6)  # distances below 2^-9 share the first bin, those from 2^7 on the last
_BIN_BITS = tl.constexpr(23 - 6)  # of a float's 23 bits of fraction, a bin goes by the first 6
_HALF_BIN = tl.constexpr(1 << 16)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LAST_INT = tl.constexpr(2147483647)


def cut(
    logits_BV: Tensor,
    slots_B: Tensor,
    settings: SamplingSettings,
    tops_BS: Tensor,
    sums_BS: Tensor,
    *,
    span: int,
    n_candidates: int = CANDIDATES,
) -> tuple[Tensor, Tensor, Tensor]:
    """What top-k and top-p leave of each row.

    tops_BS, sums_BS: float32, of each span the maximum and the sum of exp((x - maximum) / temperature).
    n_candidates: a power of two.

    Returns `kept_BS`, float32: the sum of the weights above the least kept logit, relative to the row's maximum;
    `equal_BS`, int32: how many are equal to it; and `bounds_2B`, int32: the least kept logit as an ordered number, and
    how many of its equals are kept. Rows that cut nothing have -1 there, and no more.
    """
    n_rows, vocab = logits_BV.shape
    n_spans = tops_BS.shape[1]
    kept_BS, equal_BS = torch.empty_like(tops_BS), torch.empty_like(tops_BS, dtype=torch.int32)
    bounds_2B = torch.empty((2, n_rows), dtype=torch.int32, device=logits_BV.device)
    candidates = logits_BV.new_empty((n_rows, n_candidates))
    row = (logits_BV, slots_B, settings.temperature)
    shape = {"PADDED_SPANS": triton.next_power_of_2(n_spans), "SPAN": span}
    sizes = (logits_BV.stride(0), vocab, n_spans)
    _cut_kernel[(n_rows,)](
        *row, settings.top_k, settings.top_p, tops_BS, sums_BS, candidates, bounds_2B, *sizes,
        **shape, TILE=2 * span, CANDIDATES=n_candidates, num_warps=16,
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
def _bin(x, top):
    """The bin of each logit, from 0 for those at the top."""
    number = (top - x).to(tl.int32, bitcast=True) >> _BIN_BITS
    return tl.minimum(tl.maximum(number - _FIRST_BIN, 0), _BINS - 1)


@triton.jit
def _count_bins(logits_ptr, vocab, top, TILE: tl.constexpr):
    """(BINS,) int32: how many entries are in each bin. The last one has some more."""
    lane = tl.arange(0, TILE)
    counts = tl.zeros([_BINS], tl.int32)
    for first in range(0, vocab, TILE):
        x = tl.load(logits_ptr + first + lane, mask=first + lane < vocab, other=float("-inf"))
        counts += tl.histogram(_bin(x, top), _BINS)
    return counts


@triton.jit
def _copy_bins(logits_ptr, candidates_ptr, vocab, top, rate, begin, end, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """Copy the logits of bins begin .. end. Returns the sum of the weights in the bins before, as float64."""
    lane = tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    n_copied = tl.full([], 0, tl.int32)
    for first in range(0, vocab, TILE):
        inside = first + lane < vocab
        x = tl.load(logits_ptr + first + lane, mask=inside, other=float("-inf"))
        number = _bin(x, top)
        sums += tl.where((number < begin) & inside, tl.exp2((x - top) * rate), 0.0)
        taken = (number >= begin) & (number <= end) & inside
        place = n_copied + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + place, x, mask=taken & (place < CANDIDATES))
        n_copied += tl.sum(taken.to(tl.int32), axis=0)
    tl.debug_barrier()  # what one thread has stored another will load
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit
def _least_of(numbers, measures, wanted):
    """The largest number such that the measures (float32) of those that reach it add up to `wanted` or more."""
    part = tl.arange(0, 16).to(tl.int64)
    least = tl.full([], -2147483648, tl.int64)
    for step in range(8):
        unit = tl.full([], 1, tl.int64) << (28 - 4 * step)
        bounds = (least + part * unit).to(tl.int32)
        sums = tl.sum(tl.where(numbers[:, None] >= bounds[None, :], measures[:, None], 0.0), axis=0)
        reached = tl.sum(((sums.to(tl.float64) >= wanted) & (part > 0)).to(tl.int64), axis=0)
        least += reached * unit
    return least.to(tl.int32)


@triton.jit
def _sum_above(numbers, measures, least):
    return tl.sum(tl.where(numbers > least, measures, 0.0).to(tl.float64), axis=0)


@triton.jit
def _measure(x, top, rate, inside, COUNT: tl.constexpr):
    """What an entry adds: 1 (COUNT), or its weight."""
    if COUNT:
        return tl.where(inside, 1.0, 0.0)
    else:
        return tl.where(inside, tl.exp2((x - top) * rate), 0.0)


@triton.jit
def _least_of_row(logits_ptr, vocab, top, rate, wanted, COUNT: tl.constexpr, TILE: tl.constexpr):
    """As `_least_of`, of the whole row."""
    lane = tl.arange(0, TILE)
    least = tl.full([], -2147483648, tl.int64)
    for step in range(16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * step)
        low, mid, high = least + unit, least + 2 * unit, least + 3 * unit
        # Sums of up to 2^24 counts are exact in float32; those of weights are rounded like any sum.
        low_sums = tl.zeros([TILE], tl.float32)
        mid_sums = tl.zeros([TILE], tl.float32)
        high_sums = tl.zeros([TILE], tl.float32)
        for first in range(0, vocab, TILE):
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
def _sum_above_of_row(logits_ptr, vocab, top, rate, least, COUNT: tl.constexpr, TILE: tl.constexpr):
    """As `_sum_above`, of the whole row."""
    lane = tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab, TILE):
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
    candidates_ptr,
    bounds_ptr,
    row_stride,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    rate = _LOG2_E / tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot).to(tl.float64)
    has_k = (top_k >= 1) & (top_k < vocab)
    has_p = top_p < 1.0
    logits_ptr += row * row_stride
    candidates_ptr += row * CANDIDATES
    least = tl.full([], -2147483648, tl.int32)
    n_equal = tl.full([], -1, tl.int32)
    if has_k | has_p:
        span = tl.arange(0, PADDED_SPANS)
        tops = tl.load(tops_ptr + row * n_spans + span, mask=span < n_spans, other=float("-inf"))
        sums = tl.load(sums_ptr + row * n_spans + span, mask=span < n_spans, other=0.0).to(tl.float64)
        top = tl.max(tops, axis=0)
        total = tl.sum(sums * tl.exp2((tops - top) * rate).to(tl.float64), axis=0)
        n_equal += vocab + 1

        bins = tl.arange(0, _BINS)
        counts = _count_bins(logits_ptr, vocab, top, TILE)
        reached = tl.cumsum(counts, axis=0)
        lane = tl.arange(0, CANDIDATES)
        begin = tl.full([], 0, tl.int32)
        end = tl.full([], -1, tl.int32)
        x = tl.full([CANDIDATES], float("-inf"), tl.float32)
        numbers = ordered(x)
        weights = tl.zeros([CANDIDATES], tl.float32)
        above = tl.full([], 0.0, tl.float64)  # the weight of the bins before `begin`
        if has_k:
            end = tl.sum((reached < top_k).to(tl.int32), axis=0)
            n_reached = tl.sum(tl.where(bins == end, reached, 0), axis=0)
            n_in_bin = tl.sum(tl.where(bins == end, counts, 0), axis=0)
            # All from the top on where they are few: then top-p finds its bound among them too.
            begin = tl.where(n_reached <= CANDIDATES, 0, end)
            if (end < _BINS - 1) & (n_in_bin <= CANDIDATES):
                n_before = tl.where(begin == 0, 0, n_reached - n_in_bin)
                above = _copy_bins(logits_ptr, candidates_ptr, vocab, top, rate, begin, end, TILE, CANDIDATES)
                real = lane < n_reached - n_before
                x = tl.load(candidates_ptr + lane, mask=real, other=float("-inf"))
                numbers, weights = ordered(x), tl.where(real, tl.exp2((x - top) * rate), 0.0)
                wanted = (top_k - n_before).to(tl.float64)
                least = _least_of(numbers, tl.where(real, 1.0, 0.0), wanted)
                n_equal = (wanted - _sum_above(numbers, tl.where(real, 1.0, 0.0), least)).to(tl.int32)
                total = above + _sum_above(numbers, weights, least)
            else:
                end = tl.full([], -1, tl.int32)
                wanted = top_k.to(tl.float64)
                least = _least_of_row(logits_ptr, vocab, top, rate, wanted, True, TILE)
                n_equal = (wanted - _sum_above_of_row(logits_ptr, vocab, top, rate, least, True, TILE)).to(tl.int32)
                total = _sum_above_of_row(logits_ptr, vocab, top, rate, least, False, TILE)
            total += n_equal.to(tl.float64) * _weight_of(least, top, rate)
        if has_p:
            wanted = total * top_p
            if (end < 0) | (begin > 0):
                # The weight of a bin by that of its middle tells the bin, give or take one.
                middle = (((bins + _FIRST_BIN) << _BIN_BITS) + _HALF_BIN).to(tl.float32, bitcast=True)
                estimate = tl.cumsum(counts.to(tl.float32) * tl.exp2(-middle * rate), axis=0)
                guess = tl.sum((estimate.to(tl.float64) < wanted).to(tl.int32), axis=0)
                begin, end = tl.maximum(guess - 1, 0), tl.minimum(guess + 1, _BINS - 1)
                n_before = tl.sum(tl.where(bins < begin, counts, 0), axis=0)
                n_inside = tl.sum(tl.where((bins >= begin) & (bins <= end), counts, 0), axis=0)
                if (end == _BINS - 1) | (n_inside > CANDIDATES):
                    end = tl.full([], -1, tl.int32)
                else:
                    above = _copy_bins(logits_ptr, candidates_ptr, vocab, top, rate, begin, end, TILE, CANDIDATES)
                    real = lane < n_inside
                    x = tl.load(candidates_ptr + lane, mask=real, other=float("-inf"))
                    numbers, weights = ordered(x), tl.where(real, tl.exp2((x - top) * rate), 0.0)
            is_among = (end >= 0) & (above < wanted) & (above + tl.sum(weights.to(tl.float64), axis=0) >= wanted)
            if is_among:
                nucleus = _least_of(numbers, weights, wanted - above)
                missing = wanted - above - _sum_above(numbers, weights, nucleus)
            else:
                nucleus = _least_of_row(logits_ptr, vocab, top, rate, wanted, False, TILE)
                missing = wanted - _sum_above_of_row(logits_ptr, vocab, top, rate, nucleus, False, TILE)
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
