# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Top-k and top-p without sorting: the smallest kept logit in each row, and the kept weight in each span.

`_truncate_kernel` searches among candidates (`triton_candidates.py`). If the candidates do not contain the smallest
kept logit, or are too many (for example many equal logits), `_truncate_row_kernel` searches the whole row, which takes
about ten times as long. So a wrong guess of candidates changes the speed and never the result.

A search sums the measure of entries in float64. The measure of an entry is 1 for top-k (COUNT), and its weight exp((x -
maximum) / temperature) for top-p. Keys are the ints that `order_key` gives for floats.

S spans of the vocabulary, N candidates of a row, as K blocks of C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_masked, program_id_64
from areno.kernels.sampling.reference import SamplingSettings
from areno.kernels.sampling.triton_candidates import (
    LOG2_E,
    filters_of,
    find_candidates,
    int_key_to_float,
    key_to_float,
    order_key,
    row_total,
)

_SIZES = [
    (0, 2048, 4),
    (2049, 8192, 8),
    (8193, 16384, 16),
]  # smallest and largest number of candidates that a launch handles, and its number of warps
_REGISTERS = 128  # largest number for each thread; with more, fewer programs run at once
_BLOCK = tl.constexpr(32)  # candidates of a span that are loaded together


def truncate(
    logits_BV: Tensor,
    slots_B: Tensor,
    settings: SamplingSettings,
    tops_BS: Tensor,
    sums_BS: Tensor,
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the logits of each row that top-k and top-p keep.

    Returns:
        kept_BS: float32, sum of the weights above the smallest kept logit in each span, relative to the row's maximum.
        equal_BS: int32, number of logits in each span that equal the smallest kept logit.
        bounds_3B: int32, the key of the smallest kept logit; the number of logits equal to it that are kept; and
            whether it was found among the candidates. In rows without top-k and top-p, the number is -1 and all other
            results are undefined.
    """
    (n_rows, vocab), n_spans = logits_BV.shape, tops_BS.shape[1]
    kept_BS, equal_BS = torch.empty_like(tops_BS), torch.empty_like(tops_BS, dtype=torch.int32)
    bounds_3B = torch.empty((3, n_rows), dtype=torch.int32, device=logits_BV.device)
    found = find_candidates(logits_BV, slots_B, settings, tops_BS, sums_BS, span)
    filters = (slots_B, settings.temperature, settings.top_k, settings.top_p, tops_BS, sums_BS)
    results = (kept_BS, equal_BS, bounds_3B, vocab, n_spans)
    padded = triton.next_power_of_2(n_spans)
    room = found.logits_BSR.shape[2]
    candidates = (found.logits_BSR, found.n_BS, found.bracket_2B, found.above_BS)
    for fewest, most, num_warps in _SIZES:
        how = {"PADDED_SPANS": padded, "ROOM": room, "FEWEST": fewest, "MOST": most, "maxnreg": _REGISTERS}
        _truncate_kernel[(n_rows,)](*candidates, *filters, bounds_3B, vocab, n_spans, **how, num_warps=num_warps)
    rows = (slots_B, settings.temperature, tops_BS)
    how = {"PADDED_SPANS": padded, "ROOM": room, "num_warps": 2}
    _keep_kernel[(n_rows, n_spans)](found.logits_BSR, found.n_BS, found.above_BS, *rows, *results, **how)
    _truncate_row_kernel[(n_rows,)](
        logits_BV, logits_BV.stride(0), *filters, *results, PADDED_SPANS=padded, SPAN=span, num_warps=16
    )
    return kept_BS, equal_BS, bounds_3B


@triton.jit
def _weight_of(mark, top, rate):
    return tl.exp2((mark - top) * rate).to(tl.float64)


@triton.jit
def _n_needed(missing, weight):
    """Return how many entries of equal weight sum to `missing` or more, at least 1."""
    return tl.maximum(tl.ceil(tl.where(weight > 0, missing / weight, 1.0)), 1.0).to(tl.int32)


@triton.jit
def _least_among(x, measure, wanted, low, high):
    """Return the largest key such that the entries from this key on measure at least `wanted`.

    This is true for the key `low` and false for the key `high`.
    """
    n_bits = tl.sum(((high - low) >> tl.arange(0, 32).to(tl.int64) > 0).to(tl.int32), axis=0)
    n_steps = (n_bits + 1) // 2
    least = low
    for step in range(n_steps):
        unit = tl.full([], 1, tl.int64) << (2 * (n_steps - 1 - step)).to(tl.int64)
        reached = tl.zeros([], tl.int64)
        for i in tl.static_range(1, 4):
            reached += (_measure_from(x, measure, key_to_float(least + i * unit)) >= wanted).to(tl.int64)
        least += reached * unit
    return least


@triton.jit
def _measure_from(x, measure, mark):
    """Return the total measure of the entries x >= mark."""
    return tl.sum(tl.where(x >= mark, measure, 0.0), axis=0).to(tl.float64)


@triton.jit
def _measure_above(x, measure, mark):
    """Return the total measure of the entries x > mark."""
    return tl.sum(tl.where(x > mark, measure, 0.0), axis=0).to(tl.float64)


@triton.jit
def _search(candidates, weights_of_row, filters, PADDED_SPANS: tl.constexpr, ROOM: tl.constexpr, N: tl.constexpr):
    """Return whether the smallest kept logit is among up to N candidates, its key, and how many equal to it are kept.

    `low` and `high` are the bounds of the candidates as keys, `top` is the row's maximum, `total` the sum of its
    weights, and `above_S` the sum of the weights above the candidates in each span.
    """
    candidates_ptr, n_found_S, above_S, low, high = candidates
    top, total, rate = weights_of_row
    top_k, top_p, has_k = filters
    # Candidates are loaded as a matrix, each row of which belongs to one span.
    span_S = tl.arange(0, PADDED_SPANS)
    n_blocks_S = (n_found_S + _BLOCK - 1) // _BLOCK
    end_S = tl.cumsum(n_blocks_S, axis=0)
    block_K = tl.arange(0, N // _BLOCK)
    span_K = tl.sum((end_S[None, :] <= block_K[:, None]).to(tl.int32), axis=1)
    is_span_KS = span_S[None, :] == span_K[:, None]
    first_K = (block_K - tl.sum(tl.where(is_span_KS, (end_S - n_blocks_S)[None, :], 0), axis=1)) * _BLOCK
    n_found_K = tl.sum(tl.where(is_span_KS, n_found_S[None, :], 0), axis=1)
    place_KC = first_K[:, None] + tl.arange(0, _BLOCK)[None, :]
    place_KC = tl.where(place_KC < n_found_K[:, None], span_K[:, None] * ROOM + place_KC, -1)
    place_N = tl.reshape(place_KC, [N])
    x = tl.load(candidates_ptr + place_N, mask=place_N >= 0, other=float("nan"))
    weights = tl.where(place_N >= 0, tl.exp2((x - top) * rate), 0.0)

    is_found = tl.full([], 0, tl.int32)
    n_equal = tl.full([], 0, tl.int32)
    least = low
    if has_k:
        if tl.sum(n_found_S, axis=0) >= top_k:
            is_found += 1
            count = tl.where(place_N >= 0, 1.0, 0.0)  # sums are exact in float32 up to 2^24
            least = _least_among(x, count, top_k.to(tl.float64), low, high)
            mark = key_to_float(least)
            n_equal += top_k.to(tl.int32) - _measure_above(x, count, mark).to(tl.int32)
            if top_p < 1.0:
                beyond = _measure_above(x, weights, mark)
                wanted = (beyond + n_equal.to(tl.float64) * _weight_of(mark, top, rate)) * top_p
                if beyond < wanted:  # top-p needs some logits equal to the smallest that top-k keeps
                    n_wanted = _n_needed(wanted - beyond, _weight_of(mark, top, rate))
                    n_equal = tl.minimum(n_wanted, n_equal)
                else:
                    least = _least_among(x, weights, wanted, low, high)
                    mark = key_to_float(least)
                    n_equal = _n_needed(wanted - _measure_above(x, weights, mark), _weight_of(mark, top, rate))
    else:
        wanted = total * top_p - tl.sum(above_S.to(tl.float64), axis=0)
        if (wanted > 0) & (tl.sum(weights, axis=0).to(tl.float64) >= wanted):
            is_found += 1
            least = _least_among(x, weights, wanted, low, high)
            mark = key_to_float(least)
            n_equal += _n_needed(wanted - _measure_above(x, weights, mark), _weight_of(mark, top, rate))
    return is_found, least, n_equal


@kernel
def _truncate_kernel(
    candidates_ptr,
    n_found_ptr,
    bracket_ptr,
    above_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    tops_ptr,
    sums_ptr,
    bounds_ptr,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    ROOM: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Search in each row that has FEWEST to MOST candidates.

    The kernel is launched once for each range of sizes. The launch with FEWEST = 0 first marks every row as not found.
    """
    row = program_id_64(0)
    rate, top_k, top_p, has_k = filters_of(slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    if FEWEST == 0:
        tl.store(bounds_ptr + tl.num_programs(0) + row, -1)
        tl.store(bounds_ptr + 2 * tl.num_programs(0) + row, 0)
    if has_k | (top_p < 1.0):
        span_S = tl.arange(0, PADDED_SPANS)
        real_S = span_S < n_spans
        n_found_S = load_masked(n_found_ptr + row * n_spans + span_S, real_S)
        n_found = tl.sum((n_found_S + _BLOCK - 1) // _BLOCK, axis=0) * _BLOCK  # including the padding of blocks
        if (tl.max(n_found_S, axis=0) <= ROOM) & (n_found >= FEWEST) & (n_found <= MOST):
            top, total = row_total(tops_ptr, sums_ptr, row, n_spans, rate, PADDED_SPANS)
            above_S = load_masked(above_ptr + row * n_spans + span_S, real_S)
            low = order_key(tl.load(bracket_ptr + row)).to(tl.int64)
            high = order_key(tl.load(bracket_ptr + tl.num_programs(0) + row)).to(tl.int64)
            high = tl.minimum(high, order_key(top).to(tl.int64) + 1)
            candidates = candidates_ptr + row * n_spans * ROOM, n_found_S, above_S, low, high
            filters = top_k, top_p, has_k
            is_found, least, n_equal = _search(candidates, (top, total, rate), filters, PADDED_SPANS, ROOM, MOST)
            if is_found > 0:
                tl.store(bounds_ptr + row, least)
                tl.store(bounds_ptr + tl.num_programs(0) + row, n_equal)
                tl.store(bounds_ptr + 2 * tl.num_programs(0) + row, 1)


@kernel
def _keep_kernel(
    candidates_ptr,
    n_found_ptr,
    above_ptr,
    slots_ptr,
    temperature_ptr,
    tops_ptr,
    kept_ptr,
    equal_ptr,
    bounds_ptr,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Compute `kept` and `equal` for rows whose smallest kept logit was found among the candidates."""
    row = program_id_64(0)
    if tl.load(bounds_ptr + 2 * tl.num_programs(0) + row) > 0:
        span_S = tl.arange(0, PADDED_SPANS)
        tops = tl.load(tops_ptr + row * n_spans + span_S, mask=span_S < n_spans, other=float("-inf"))
        rate = LOG2_E / tl.load(temperature_ptr + tl.load(slots_ptr + row))
        cell = row * n_spans + tl.program_id(1)
        place = tl.arange(0, ROOM)
        is_found = place < tl.load(n_found_ptr + cell)
        x = tl.load(candidates_ptr + cell * ROOM + place, mask=is_found, other=float("nan"))
        mark = int_key_to_float(tl.load(bounds_ptr + row))
        kept = tl.sum(tl.where(x > mark, tl.exp2((x - tl.max(tops, axis=0)) * rate), 0.0), axis=0)
        tl.store(kept_ptr + cell, tl.load(above_ptr + cell) + kept)
        tl.store(equal_ptr + cell, tl.sum((x == mark).to(tl.int32), axis=0))


@triton.jit
def _measure(x, top, rate, inside, COUNT: tl.constexpr):
    if COUNT:
        return tl.where(inside, 1.0, 0.0)
    else:
        return tl.where(inside, tl.exp2((x - top) * rate), 0.0)


@triton.jit
def _least_key_in_row(logits_ptr, vocab, top, rate, wanted, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """Return the largest key such that the row's entries from it on measure at least `wanted`."""
    lane = tl.arange(0, SPAN)
    least = tl.full([], -2147483648, tl.int64)
    for step in range(16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * step)
        low, mid, high = least + unit, least + 2 * unit, least + 3 * unit
        # Sums of counts are exact in float32 up to 2^24; sums of weights are rounded.
        low_sums = tl.zeros([SPAN], tl.float32)
        mid_sums = tl.zeros([SPAN], tl.float32)
        high_sums = tl.zeros([SPAN], tl.float32)
        for first in range(0, vocab, SPAN):
            inside = first + lane < vocab
            x = tl.load(logits_ptr + first + lane, mask=inside, other=float("-inf"))
            number = order_key(x)
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
def _measure_row_above(logits_ptr, vocab, top, rate, least, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """Return the total measure of the row's entries whose key is above `least`."""
    lane = tl.arange(0, SPAN)
    sums = tl.zeros([SPAN], tl.float32)
    for first in range(0, vocab, SPAN):
        inside = first + lane < vocab
        x = tl.load(logits_ptr + first + lane, mask=inside, other=float("-inf"))
        sums += tl.where(order_key(x) > least, _measure(x, top, rate, inside, COUNT), 0.0)
    return tl.sum(sums.to(tl.float64), axis=0)


@kernel
def _truncate_row_kernel(
    logits_ptr,
    row_stride,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    tops_ptr,
    sums_ptr,
    kept_ptr,
    equal_ptr,
    bounds_ptr,
    vocab,
    n_spans,
    PADDED_SPANS: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = program_id_64(0)
    rate, top_k, top_p, has_k = filters_of(slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    has_p = top_p < 1.0
    if (has_k | has_p) & (tl.load(bounds_ptr + 2 * tl.num_programs(0) + row) == 0):
        logits_ptr += row * row_stride
        top, total = row_total(tops_ptr, sums_ptr, row, n_spans, rate, PADDED_SPANS)
        least = tl.full([], -2147483648, tl.int32)
        n_equal = tl.full([], 0, tl.int32) + vocab
        if has_k:
            wanted = top_k.to(tl.float64)
            least = _least_key_in_row(logits_ptr, vocab, top, rate, wanted, True, SPAN)
            n_equal = (wanted - _measure_row_above(logits_ptr, vocab, top, rate, least, True, SPAN)).to(tl.int32)
            total = _measure_row_above(logits_ptr, vocab, top, rate, least, False, SPAN)
            total += n_equal.to(tl.float64) * _weight_of(int_key_to_float(least), top, rate)
        if has_p:
            wanted = total * top_p
            nucleus = _least_key_in_row(logits_ptr, vocab, top, rate, wanted, False, SPAN)
            missing = wanted - _measure_row_above(logits_ptr, vocab, top, rate, nucleus, False, SPAN)
            if nucleus >= least:
                # Of the logits equal to the smallest kept, keep as many as top-p needs, but not more than top-k keeps.
                n_wanted = _n_needed(missing, _weight_of(int_key_to_float(nucleus), top, rate))
                n_equal = tl.where(nucleus > least, n_wanted, tl.minimum(n_wanted, n_equal))
                least = nucleus
        tl.store(bounds_ptr + row, least)
        tl.store(bounds_ptr + tl.num_programs(0) + row, n_equal)
        for span in range(n_spans):
            index = span * SPAN + tl.arange(0, SPAN)
            inside = index < vocab
            x = tl.load(logits_ptr + index, mask=inside, other=float("-inf"))
            number = order_key(x)
            kept = tl.sum(tl.where((number > least) & inside, tl.exp2((x - top) * rate), 0.0), axis=0)
            tl.store(kept_ptr + row * n_spans + span, kept)
            tl.store(equal_ptr + row * n_spans + span, tl.sum(((number == least) & inside).to(tl.int32), axis=0))
