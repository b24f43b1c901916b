# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Drawing tokens as Triton kernels: one pass over the logits, then the draw from a single span of them.

The vocabulary is cut into spans. `_scan_kernel` reads each span once and leaves its maximum, the first entry that has
it, and the sum of exp((x - maximum) / temperature). `_draw_kernel` joins the spans of a row, which gives the
normaliser, finds the span in which the running sum passes the row's random number, and reads that span again to find
the entry. With top-k or top-p, `_cut_kernel` comes between them: it finds the least kept logit two bits at a time, by
counting or summing what reaches a candidate, so nothing is sorted.

Shape letters as in `reference.py`; S spans. No number of one step goes into a launch, so all of it can be captured in a
CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.sampling.reference import SamplingSettings

_SPAN = 4096
_LOG2_E = tl.constexpr(1.4426950408889634)
_LAST_INT = tl.constexpr(2147483647)


def sample_slots(
    logits_BV: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    *,
    filtered: bool,
    span: int = _SPAN,
) -> Tensor:
    """As `areno.kernels.sampling.sample_slots`, without bans. span: a power of two."""
    n_rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    n_spans = triton.cdiv(vocab, span)
    tops = logits_BV.new_empty((n_rows, n_spans))
    sums = torch.empty_like(tops)
    best = torch.empty_like(tops, dtype=torch.int32)
    out = logits_BV.new_empty((2, n_rows), dtype=torch.float64)
    shape = {"PADDED_SPANS": triton.next_power_of_2(n_spans), "SPAN": span}
    _scan_kernel[(n_rows, n_spans)](
        logits_BV, slots_B, settings.temperature, tops, sums, best, logits_BV.stride(0), vocab, SPAN=span, num_warps=8
    )
    kept = sums_equal = bounds = None
    if filtered:
        kept, sums_equal = torch.empty_like(tops), torch.empty_like(best)
        bounds = torch.empty((2, n_rows), dtype=torch.int32, device=logits_BV.device)
        _cut_kernel[(n_rows,)](
            logits_BV,
            slots_B,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            tops,
            sums,
            kept,
            sums_equal,
            bounds,
            logits_BV.stride(0),
            vocab,
            n_spans,
            **shape,
            num_warps=16,
        )
    _draw_kernel[(n_rows,)](
        logits_BV,
        slots_B,
        positions_B,
        settings.key,
        settings.temperature,
        settings.greedy,
        settings.last_token,
        tops,
        sums,
        best,
        kept,
        sums_equal,
        bounds,
        out,
        logits_BV.stride(0),
        vocab,
        n_spans,
        **shape,
        num_warps=8,
    )
    return out


@triton.jit
def _scan_kernel(
    logits_ptr, slots_ptr, temperature_ptr, tops_ptr, sums_ptr, best_ptr, row_stride, vocab, SPAN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    index = span * SPAN + tl.arange(0, SPAN)
    x = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab, other=float("-inf"))
    rate = _LOG2_E / tl.load(temperature_ptr + tl.load(slots_ptr + row))
    top = tl.max(x, axis=0)
    # A span of -inf alone weighs nothing; without this it would be NaN.
    weights = tl.exp2((x - tl.where(top == float("-inf"), 0.0, top)) * rate)
    cell = row * tl.num_programs(1) + span
    tl.store(tops_ptr + cell, top)
    tl.store(sums_ptr + cell, tl.sum(weights, axis=0))
    tl.store(best_ptr + cell, tl.min(tl.where(x == top, index, _LAST_INT), axis=0))


@triton.jit
def _ordered(x):
    """int32 numbers in the order of the floats (of the two zeros, as one)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _LAST_INT, bits)


@triton.jit
def _from_ordered(number):
    return tl.where(number < 0, number ^ _LAST_INT, number).to(tl.float32, bitcast=True)


@triton.jit
def _measure(number, x, top, rate, inside, COUNT: tl.constexpr):
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
            number = _ordered(x)
            measure = _measure(number, x, top, rate, inside, COUNT)
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
        number = _ordered(x)
        sums += tl.where(number > least, _measure(number, x, top, rate, inside, COUNT), 0.0)
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
    kept_ptr,
    equal_ptr,
    bounds_ptr,
    row_stride,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The least kept logit of each row, as an ordered number, and how many of those equal to it are kept: `bounds`.

    For each span: `kept`, the sum of the weights above it, relative to the row's maximum, and `equal`, the number of
    its equals. A row that cuts nothing has -1 for the number that is kept, and no more.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    rate = _LOG2_E / tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot).to(tl.float64)
    has_k = (top_k >= 1) & (top_k < vocab)
    has_p = top_p < 1.0
    logits_ptr += row * row_stride
    n_equal = tl.full([], -1, tl.int32)
    if has_k | has_p:
        span = tl.arange(0, PADDED_SPANS)
        tops = tl.load(tops_ptr + row * n_spans + span, mask=span < n_spans, other=float("-inf"))
        sums = tl.load(sums_ptr + row * n_spans + span, mask=span < n_spans, other=0.0).to(tl.float64)
        top = tl.max(tops, axis=0)
        total = tl.sum(sums * tl.exp2((tops - top) * rate).to(tl.float64), axis=0)
        least = tl.full([], -2147483648, tl.int32)
        n_equal = tl.full([], 0, tl.int32) + vocab
        if has_k:
            wanted = top_k.to(tl.float64)
            least = _least_kept(logits_ptr, vocab, top, rate, wanted, True, SPAN)
            n_equal = (wanted - _above(logits_ptr, vocab, top, rate, least, True, SPAN)).to(tl.int32)
            weight = tl.exp2((_from_ordered(least) - top) * rate).to(tl.float64)
            total = _above(logits_ptr, vocab, top, rate, least, False, SPAN) + n_equal.to(tl.float64) * weight
        if has_p:
            wanted = total * top_p
            nucleus = _least_kept(logits_ptr, vocab, top, rate, wanted, False, SPAN)
            if nucleus >= least:
                missing = wanted - _above(logits_ptr, vocab, top, rate, nucleus, False, SPAN)
                weight = tl.exp2((_from_ordered(nucleus) - top) * rate).to(tl.float64)
                # Of the equals as many as the share takes, at least one; no more than k leaves.
                n_wanted = tl.maximum(tl.ceil(tl.where(weight > 0, missing / weight, 1.0)), 1.0).to(tl.int32)
                n_equal = tl.where(nucleus > least, n_wanted, tl.minimum(n_wanted, n_equal))
                least = nucleus
        lane = tl.arange(0, SPAN)
        for first in range(0, vocab, SPAN):
            inside = first + lane < vocab
            x = tl.load(logits_ptr + first + lane, mask=inside, other=float("-inf"))
            number = _ordered(x)
            above = tl.where((number > least) & inside, tl.exp2((x - top) * rate), 0.0)
            cell = row * n_spans + first // SPAN
            tl.store(kept_ptr + cell, tl.sum(above, axis=0))
            tl.store(equal_ptr + cell, tl.sum(((number == least) & inside).to(tl.int32), axis=0))
        tl.store(bounds_ptr + row, least)
    tl.store(bounds_ptr + tl.num_programs(0) + row, n_equal)


@triton.jit
def _uniform(key, position):
    """splitmix64, as `reference.uniform`: float64 in [0, 1)."""
    value = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = value ^ (value >> 31)
    return (value >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _draw_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    key_ptr,
    temperature_ptr,
    greedy_ptr,
    last_token_ptr,
    tops_ptr,
    sums_ptr,
    best_ptr,
    kept_ptr,
    equal_ptr,
    bounds_ptr,
    out_ptr,
    row_stride,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    rate = _LOG2_E / temperature
    uniform = _uniform(tl.load(key_ptr + slot), tl.load(positions_ptr + row))
    below_one = 1.0 - 8.881784197001252e-16  # 1 - 2^-50: targets stay below the last running sum

    span_S = tl.arange(0, PADDED_SPANS)
    real = span_S < n_spans
    cell = row * n_spans + span_S
    tops = tl.load(tops_ptr + cell, mask=real, other=float("-inf"))
    sums = tl.load(sums_ptr + cell, mask=real, other=0.0).to(tl.float64)
    best = tl.load(best_ptr + cell, mask=real, other=_LAST_INT)
    top = tl.max(tops, axis=0)
    best = tl.minimum(tl.min(tl.where(tops == top, best, _LAST_INT), axis=0), vocab - 1)
    sums = sums * tl.exp2((tops - top) * rate).to(tl.float64)
    log_norm = tl.log(tl.sum(sums, axis=0))

    least = tl.full([], -2147483648, tl.int32)
    n_equal = tl.full([], -1, tl.int32)
    n_before = tl.zeros([PADDED_SPANS], tl.int32)
    if bounds_ptr is not None:
        n_equal = tl.load(bounds_ptr + tl.num_programs(0) + row)
        if n_equal >= 0:
            least = tl.load(bounds_ptr + row)
            equal = tl.load(equal_ptr + cell, mask=real, other=0)
            n_before = tl.cumsum(equal, axis=0) - equal
            n_taken = tl.minimum(tl.maximum(n_equal - n_before, 0), equal)
            weight = tl.exp2((_from_ordered(least) - top) * rate)
            weight = tl.where(n_taken > 0, weight, 0.0)  # of nothing, where the number is that of no float
            sums = tl.load(kept_ptr + cell, mask=real, other=0.0).to(tl.float64)
            sums += n_taken.to(tl.float64) * weight.to(tl.float64)

    running = tl.cumsum(sums, axis=0)
    total = tl.max(running, axis=0)
    target = tl.minimum(uniform * total, total * below_one)
    passed = running <= target
    span = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), n_spans - 1)
    target -= tl.max(tl.where(passed, running, 0.0), axis=0)

    lane = tl.arange(0, SPAN)
    index = span * SPAN + lane
    inside = index < vocab
    x = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=float("-inf"))
    weights = tl.where(inside, tl.exp2((x - top) * rate), 0.0)
    if bounds_ptr is not None:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
        if n_equal >= 0:
            number = _ordered(x)
            before = tl.sum(tl.where(span_S == span, n_before, 0), axis=0)
            is_equal = ((number == least) & inside).to(tl.int32)
            rank = before + tl.cumsum(is_equal, axis=0) - is_equal
            is_kept = (number > least) | ((number == least) & (rank < n_equal))
            weights = tl.where(is_kept, weights, 0.0)
    inner = tl.cumsum(weights.to(tl.float64), axis=0)
    target = tl.minimum(target, tl.max(inner, axis=0) * below_one)
    drawn = tl.sum((inner <= target).to(tl.int32), axis=0)
    is_drawable = tl.sum(tl.where(lane == drawn, weights, 0.0), axis=0) > 0  # NaN is not, nor what rounding left
    takes_best = tl.load(greedy_ptr + slot) | (is_drawable == 0)
    token = tl.where(takes_best, best, tl.minimum(span * SPAN + drawn, vocab - 1))
    chosen = tl.load(logits_ptr + row * row_stride + token)
    logprob = ((chosen - top) / temperature).to(tl.float64) - log_norm
    tl.store(out_ptr + row, token.to(tl.float64))
    tl.store(out_ptr + tl.num_programs(0) + row, logprob)
    tl.store(last_token_ptr + slot, token.to(tl.int64))
