# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Candidates for the smallest logit in each row that top-k or top-p keeps.

`_bracket_kernel` guesses two bounds, from a sample of the row's logits, between which the smallest kept logit lies.
`_gather_kernel` collects the logits between the bounds, the candidates, in the order of the vocabulary. It also sums
the weights above the upper bound. The caller has to check that the guess was right.

S spans of the vocabulary, R room for the candidates in a span.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_masked, program_id_64
from areno.kernels.sampling.reference import SamplingSettings

ROOM = 1024  # largest number of candidates that are stored for a span
_SAMPLED = 8192  # sampled entries of a row, in groups of 8 neighbours (32 bytes, a sector of memory)
LOG2_E = tl.constexpr(1.4426950408889634)
LAST_INT = tl.constexpr(2147483647)
_INFINITY = tl.constexpr(2139095040)  # the key of infinity; the key of -infinity is -_INFINITY - 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of each row with top-k or top-p. If there are more than R in a span, some are missing."""

    logits_BSR: Tensor
    n_BS: Tensor  # int32, number of candidates, which may be above R
    bracket_2B: Tensor  # lower bound (included) and upper bound (excluded)
    above_BS: Tensor  # sum of weights from the upper bound on, relative to the row's maximum


def find_candidates(
    logits_BV: Tensor, slots_B: Tensor, settings: SamplingSettings, tops_BS: Tensor, sums_BS: Tensor, span: int
) -> Candidates:
    """Find candidates. `tops_BS` are the largest logits of spans, `sums_BS` sums of exp((x - top) / temperature)."""
    (n_rows, vocab), n_spans = logits_BV.shape, tops_BS.shape[1]
    found = Candidates(
        logits_BV.new_empty((n_rows, n_spans, min(span, ROOM))),
        torch.empty_like(tops_BS, dtype=torch.int32),
        logits_BV.new_empty((2, n_rows)),
        torch.empty_like(tops_BS),
    )
    row = (logits_BV, slots_B, settings.temperature)
    sizes = (logits_BV.stride(0), vocab, n_spans)
    padded = triton.next_power_of_2(n_spans)
    filters = (settings.top_k, settings.top_p, tops_BS, sums_BS)
    how = {"PADDED_SPANS": padded, "SAMPLED": _SAMPLED, "num_warps": 4}
    _bracket_kernel[(n_rows,)](*row, *filters, found.bracket_2B, *sizes, **how)
    results = (found.n_BS, found.above_BS, found.logits_BSR)
    how = {"PADDED_SPANS": padded, "SPAN": span, "ROOM": found.logits_BSR.shape[2], "num_warps": 8}
    _gather_kernel[(n_rows, n_spans)](*row, tops_BS, found.bracket_2B, *results, *sizes, **how)
    return found


@triton.jit
def order_key(x):
    """Map floats to int32 keys with the same order. 0.0 and -0.0 have the same key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ LAST_INT, bits)


@triton.jit
def int_key_to_float(number):
    return tl.where(number < 0, number ^ LAST_INT, number).to(tl.float32, bitcast=True)


@triton.jit
def key_to_float(number):
    """Map an int64 key of `order_key` to the float, after clamping the key so that the float is never NaN."""
    return int_key_to_float(tl.minimum(tl.maximum(number, -_INFINITY - 1), _INFINITY).to(tl.int32))


@triton.jit
def filters_of(slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
    """Return a row's rate, top-k, top-p in float64, and whether top-k drops a token."""
    slot = tl.load(slots_ptr + row)
    rate = LOG2_E / tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    return rate, top_k, tl.load(top_p_ptr + slot).to(tl.float64), (top_k >= 1) & (top_k < vocab)


@triton.jit
def row_total(tops_ptr, sums_ptr, row, n_spans, rate, PADDED_SPANS: tl.constexpr):
    """Return the maximum of a row, and the sum of its weights relative to the maximum, in float64."""
    span = tl.arange(0, PADDED_SPANS)
    tops = tl.load(tops_ptr + row * n_spans + span, mask=span < n_spans, other=float("-inf"))
    sums = load_masked(sums_ptr + row * n_spans + span, span < n_spans).to(tl.float64)
    top = tl.max(tops, axis=0)
    return top, tl.sum(sums * tl.exp2((tops - top) * rate).to(tl.float64), axis=0)


@triton.jit
def _margin(total, weight):
    """Return a safety margin for a sum of sampled weights that are at most `weight` each.

    The margin is four standard deviations of the sum, plus 4 * weight for small samples.
    """
    return 4.0 * tl.sqrt(total * weight) + 4.0 * weight


@triton.jit
def _largest_key_with(x, n_wanted):
    """Return nearly the largest key (its 20 highest bits) with at least `n_wanted` entries at or above it."""
    least = tl.full([], -2147483648, tl.int64)
    for step in range(10):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * step)
        reached = tl.zeros([], tl.int64)
        for i in tl.static_range(1, 4):
            n_reaching = tl.sum((x >= key_to_float(least + i * unit)).to(tl.int32), axis=0)
            reached += (n_reaching >= n_wanted).to(tl.int64)
        least += reached * unit
    return least


@triton.jit
def _largest_below_limit(x, weights, limit, first, width, top, rate, STEPS: tl.constexpr, GROWS: tl.constexpr):
    """Return nearly the largest value v >= `first` such that the weights of entries below v sum to at most `limit`.

    The search is between `first` and `first + width`, and its result is too small by less than width / 4^STEPS. If
    GROWS, the sum includes `_margin`, for which the largest weight is that of v: exp2((v - top) * rate).
    """
    for _ in range(STEPS):
        width /= 4
        reached = tl.zeros([], tl.float32)
        for i in tl.static_range(1, 4):
            mark = first + i * width
            below = tl.sum(tl.where(x < mark, weights, 0.0), axis=0)
            if GROWS:
                below += _margin(below, tl.exp2((mark - top) * rate))
            reached += (below <= limit).to(tl.float32)
        first += reached * width
    return first


@kernel
def _bracket_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    tops_ptr,
    sums_ptr,
    bracket_ptr,
    row_stride,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    row = program_id_64(0)
    rate, top_k, top_p, has_k = filters_of(slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    low = tl.full([], float("inf"), tl.float32)
    high = tl.full([], float("inf"), tl.float32)
    if has_k | (top_p < 1.0):
        lane = tl.arange(0, SAMPLED)
        group = lane // 8
        index = tl.maximum(group * vocab // (SAMPLED // 8), group * 8) + lane % 8
        inside = index < vocab
        x = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=float("nan"))
        share = tl.sum(inside.to(tl.int32), axis=0).to(tl.float32) / vocab
        if has_k:  # no upper bound, so that top-p can search among the candidates, too
            expected = top_k.to(tl.float32) * share
            low = key_to_float(_largest_key_with(x, expected + _margin(expected, 1.0)))
        else:
            # Guess from the weight that top-p drops: a sample estimates a sum of many small weights well.
            top, total = row_total(tops_ptr, sums_ptr, row, n_spans, rate, PADDED_SPANS)
            weights = tl.where(inside, tl.exp2((x - top) * rate), 0.0)
            left = ((1.0 - top_p) * total).to(tl.float32)
            limit = left * share
            # Entries below `low` weigh less than `left` together, so top-p drops them all.
            low = top + tl.log2(left / vocab) / rate
            low = _largest_below_limit(x, weights, limit, low, top - low, top, rate, 6, True)
            middle = _largest_below_limit(x, weights, limit, low, top - low, top, rate, 5, False)
            margin = 1.5 * _margin(limit, tl.exp2((middle - top) * rate))
            high = _largest_below_limit(x, weights, limit + margin, middle, top - middle, top, rate, 6, False)
            step = (top - middle) / 4096
            high = tl.where(high + 2 * step < top, high + step, float("inf"))
            low = tl.where(low < high, low, float("-inf"))  # also if `low` is NaN
    tl.store(bracket_ptr + row, low)
    tl.store(bracket_ptr + tl.num_programs(0) + row, high)


@kernel
def _gather_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    tops_ptr,
    bracket_ptr,
    n_found_ptr,
    above_ptr,
    candidates_ptr,
    row_stride,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = program_id_64(0)
    low = tl.load(bracket_ptr + row)
    high = tl.load(bracket_ptr + tl.num_programs(0) + row)
    if low < high:
        # One thread loads four neighbours, a group: a prefix sum over groups is cheaper than over entries.
        group_G = tl.arange(0, SPAN // 4)
        index = tl.program_id(1) * SPAN + group_G[:, None] * 4 + tl.arange(0, 4)[None, :]
        # NaN is neither a candidate nor above the upper bound.
        x = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab, other=float("nan"))
        is_found = ((x >= low) & (x < high)).to(tl.int32)
        n_G = tl.sum(is_found, axis=1)
        place = tl.cumsum(is_found, axis=1) - is_found + (tl.cumsum(n_G, axis=0) - n_G)[:, None]
        cell = row * n_spans + tl.program_id(1)
        tl.store(candidates_ptr + cell * ROOM + place, x, mask=(is_found > 0) & (place < ROOM))
        tl.store(n_found_ptr + cell, tl.sum(n_G, axis=0))
        above = tl.zeros([], tl.float32)
        if high < float("inf"):
            span_S = tl.arange(0, PADDED_SPANS)
            tops = tl.load(tops_ptr + row * n_spans + span_S, mask=span_S < n_spans, other=float("-inf"))
            rate = LOG2_E / tl.load(temperature_ptr + tl.load(slots_ptr + row))
            weights = tl.where(x >= high, tl.exp2((x - tl.max(tops, axis=0)) * rate), 0.0)
            above = tl.sum(tl.sum(weights, axis=1), axis=0)
        tl.store(above_ptr + cell, above)
