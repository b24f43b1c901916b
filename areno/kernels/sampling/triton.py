# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Sampling as Triton kernels: one pass over the logits, then the choice of a token within a single span of them.

The vocabulary is cut into spans of consecutive logits. `_scan_kernel` reads each span once and writes three statistics:
its maximum, the index of the first logit with the maximum, and the sum of exp((x - maximum) / temperature). If bans, a
penalty or ids without a text change what is drawn, it also writes the maximum and sum of the policy's own logits. It
stores the changed logits where another kernel has to read them. `_draw_kernel` combines the spans of a row, which gives
the normaliser. It finds the span in which the running sum passes the row's random number, and reads that span again to
find the token. With top-k or top-p, the kernels in `triton_truncate.py` run in between.

Under tensor parallelism, a rank scans its own columns and sends the statistics of its spans to the other ranks. All
ranks then know the span of the sampled token, and the rank with this span finds the token.

Launches depend on shapes alone, so a CUDA graph can capture them. `span` is the number of logits in a span, a power of
two. `rate` is log2(e) / temperature. S spans, P statistics of a span, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_masked, program_id_64
from areno.kernels.sampling.reference import SamplingFlags, SamplingSettings
from areno.kernels.sampling.triton_candidates import LAST_INT, LOG2_E, int_key_to_float, order_key
from areno.kernels.sampling.triton_truncate import truncate

_SPAN = 4096
# The alignment of these depends on the number of rows, so kernels specialised on it would be compiled again.
_ROW_POINTERS = ["slots_ptr", "positions_ptr"]


def sample_slots(
    logits_BV: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    flags: SamplingFlags,
    *,
    span: int = _SPAN,
) -> Tensor:
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    n_spans = triton.cdiv(logits_BV.shape[1], span)
    stats_PBS = _compute_span_stats(logits_BV, slots_B, positions_B, settings, flags, n_spans, span)
    truncated = None, None, None
    if flags.filtered:
        truncated = truncate(logits_BV, slots_B, settings, stats_PBS[0], stats_PBS[1], span)
    return _sample_from_stats(logits_BV, slots_B, positions_B, settings, flags, stats_PBS.unsqueeze(0), truncated, span)


def sample_columns(
    columns_BV: Tensor,
    vocab: int,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    flags: SamplingFlags,
    rank: int,
    all_gather: Callable[[Tensor], Tensor],
    span: int = _SPAN,
) -> Tensor:
    """Sample one token for each row from logits whose columns are split equally over tensor-parallel ranks.

    The ranks exchange a few statistics of each row by `all_gather`, x -> (ranks, *x.shape), instead of logits, and all
    get the same tokens. Columns after the vocabulary are padding. Only the rank with a sampled token's column updates
    `last_token`.
    """
    n_columns = columns_BV.shape[1]
    n_spans = triton.cdiv(n_columns, span)
    first = min(rank * n_columns, vocab)
    columns_BV = columns_BV[:, : vocab - first]
    stats_PBS = _compute_span_stats(columns_BV, slots_B, positions_B, settings, flags, n_spans, span, first)
    stats_RPBS = all_gather(stats_PBS)
    drawn_2B = _sample_from_stats(
        columns_BV, slots_B, positions_B, settings, flags, stats_RPBS, (None, None, None), span, rank, n_columns, vocab
    )
    return all_gather(drawn_2B).sum(0)


def _compute_span_stats(
    logits_BV: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    flags: SamplingFlags,
    n_spans: int,
    span: int,
    first: int = 0,
) -> Tensor:
    """Return the statistics of each span, float32 (3 or 5, B, n_spans).

    The first three are those of the logits that are drawn from: the maximum, the sum of weights, and the vocabulary
    index of the first maximum, as int32 bits. If the policy's own logits differ, their maximum and sum follow. `first`
    is the vocabulary index of this rank's first column.
    """
    n_rows, vocab = logits_BV.shape
    texts = settings.texts
    stats_PBS = logits_BV.new_empty((3 if texts is None and not flags.edits_logits else 5, n_rows, n_spans))
    rows = (logits_BV, slots_B, positions_B, settings.temperature)
    edits = (settings.min_new, settings.banned, settings.penalty, settings.counts)
    results = (stats_PBS, stats_PBS.view(torch.int32))
    allowed = (None, 0) if texts is None else (texts.words_W, texts.n_first)
    _scan_kernel[(n_rows, n_spans)](
        *rows,
        *edits,
        *results,
        *allowed,
        logits_BV.stride(0),
        vocab,
        first,
        SPAN=span,
        N_BANNED=flags.n_banned,
        PENALIZED=flags.penalized,
        HAS_TEXTS=texts is not None,
        STORES=settings.overwrites_logits(flags),
        num_warps=8,
    )
    return stats_PBS


def _sample_from_stats(
    logits_BV: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    flags: SamplingFlags,
    stats_RPBS: Tensor,
    truncated: tuple[Tensor | None, Tensor | None, Tensor | None],
    span: int,
    rank: int = 0,
    n_columns: int = 0,
    whole_vocab: int | None = None,
) -> Tensor:
    """Return token ids and log-probabilities, or zeros for rows whose token is in another rank's columns.

    `truncated` are the results of `truncate`, if any. `whole_vocab` is None if this rank has all columns.
    """
    n_rows, vocab = logits_BV.shape
    n_ranks, n_stats, _, n_spans = stats_RPBS.shape
    out_2B = logits_BV.new_empty((2, n_rows), dtype=torch.float64)
    slots = (settings.key, settings.temperature, settings.greedy, settings.last_token, settings.penalty)
    stats = (stats_RPBS, stats_RPBS.view(torch.int32))
    numbers = (logits_BV.stride(0), vocab, n_spans, rank, n_columns, whole_vocab or vocab)
    _draw_kernel[(n_rows,)](
        logits_BV,
        slots_B,
        positions_B,
        *slots,
        settings.counts,
        *stats,
        *truncated,
        None if settings.texts is None else settings.texts.words_W,
        out_2B,
        *numbers,
        SPAN=span,
        N_RANKS=n_ranks,
        N_STATS=n_stats,
        PADDED_SPANS=triton.next_power_of_2(n_ranks * n_spans),
        PENALIZED=flags.penalized,
        FILTERED=flags.filtered,
        HAS_TEXTS=settings.texts is not None,
        num_warps=8,
    )
    return out_2B


@kernel(do_not_specialize_on_alignment=_ROW_POINTERS)
def _scan_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    min_new_ptr,
    banned_ptr,
    penalty_ptr,
    counts_ptr,
    stats_ptr,
    stats_int_ptr,
    texts_ptr,
    n_first,
    row_stride,
    vocab,
    first,
    SPAN: tl.constexpr,
    N_BANNED: tl.constexpr,
    PENALIZED: tl.constexpr,
    HAS_TEXTS: tl.constexpr,
    STORES: tl.constexpr,
):
    row = program_id_64(0)
    span = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    index = span * SPAN + tl.arange(0, SPAN)
    inside = index < vocab
    logits_ptr += row * row_stride
    x = tl.load(logits_ptr + index, mask=inside, other=float("-inf"))
    rate = LOG2_E / tl.load(temperature_ptr + slot)
    cell = row * tl.num_programs(1) + span
    n_cells = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    top, total = _top_and_sum(x, rate)
    if PENALIZED or N_BANNED > 0 or HAS_TEXTS:
        tl.store(stats_ptr + 3 * n_cells + cell, top)
        tl.store(stats_ptr + 4 * n_cells + cell, total)
    if HAS_TEXTS:  # noqa: SIM102 (decided when the kernel is compiled)
        if first + (span + 1) * SPAN > n_first:  # spans in which all ids have a text are not computed again
            drawn = tl.where(has_text(texts_ptr, first + index, inside), x, float("-inf"))
            if STORES:
                tl.store(logits_ptr + index, drawn, mask=inside & (drawn != x))
            x = drawn
            top, total = _top_and_sum(x, rate)
    if PENALIZED or N_BANNED > 0:
        edited = x
        if PENALIZED:
            penalty = tl.load(penalty_ptr + slot)
            if penalty != 0:
                edited -= penalty * load_masked(counts_ptr + slot * vocab + index, inside).to(tl.float32)
        if N_BANNED > 0:  # noqa: SIM102 (decided when the kernel is compiled)
            if tl.load(positions_ptr + row) < tl.load(min_new_ptr + slot):
                for i in range(N_BANNED):
                    banned = tl.load(banned_ptr + slot * N_BANNED + i)
                    edited = tl.where(first + index == banned, float("-inf"), edited)
        tl.store(logits_ptr + index, edited, mask=inside & (edited != x))
        x = edited
        top, total = _top_and_sum(x, rate)
    tl.store(stats_ptr + cell, top)
    tl.store(stats_ptr + n_cells + cell, total)
    tl.store(stats_int_ptr + 2 * n_cells + cell, tl.min(tl.where(x == top, first + index, LAST_INT), axis=0))


@triton.jit
def has_text(texts_ptr, index, inside):
    return ((load_masked(texts_ptr + index // 32, inside) >> (index % 32)) & 1) == 1


@triton.jit
def _top_and_sum(x, rate):
    """Return the maximum of x, and the sum of exp2((x - maximum) * rate), which is 0 if all x are -inf."""
    top = tl.max(x, axis=0)
    # If all x are -inf, the sum is 0. Without `tl.where` it would be NaN.
    return top, tl.sum(tl.exp2((x - tl.where(top == float("-inf"), 0.0, top)) * rate), axis=0)


@triton.jit
def _join_spans(stats_ptr, n_cells, cell, real, rate):
    """Combine the statistics of the spans of a row.

    Return the maximum of the row, that of each span, and the float64 sum of each span's weights relative to the row's
    maximum. `cell` is the index of each span's maximum in the statistics, and its sum lies `n_cells` elements later.
    """
    tops = tl.load(stats_ptr + cell, mask=real, other=float("-inf"))
    sums = load_masked(stats_ptr + n_cells + cell, real).to(tl.float64)
    top = tl.max(tops, axis=0)
    return top, tops, sums * tl.exp2((tops - top) * rate).to(tl.float64)


@triton.jit
def _mix_bits(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(key, position):
    value = _mix_bits(key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (value >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _first_above(running, target):
    """Return the index of the first running sum above `target`, and `target` minus the running sum before this index.

    A target that is not below the last running sum is lowered first, so that there is such an index. All numbers are
    float64.
    """
    target = tl.minimum(target, tl.max(running, axis=0) * (1.0 - 8.881784197001252e-16))  # 1 - 2^-50
    passed = running <= target
    return tl.sum(passed.to(tl.int32), axis=0), target - tl.max(tl.where(passed, running, 0.0), axis=0)


@kernel(do_not_specialize_on_alignment=_ROW_POINTERS)
def _draw_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    key_ptr,
    temperature_ptr,
    greedy_ptr,
    last_token_ptr,
    penalty_ptr,
    counts_ptr,
    stats_ptr,
    stats_int_ptr,
    kept_ptr,
    equal_ptr,
    bounds_ptr,
    texts_ptr,
    out_ptr,
    row_stride,
    vocab,
    rank_spans,
    rank,
    n_columns,
    whole_vocab,
    SPAN: tl.constexpr,
    N_RANKS: tl.constexpr,
    N_STATS: tl.constexpr,
    PADDED_SPANS: tl.constexpr,
    PENALIZED: tl.constexpr,
    FILTERED: tl.constexpr,
    HAS_TEXTS: tl.constexpr,
):
    row = program_id_64(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    rate = LOG2_E / temperature
    uniform = _uniform(tl.load(key_ptr + slot), tl.load(positions_ptr + row))

    span_S = tl.arange(0, PADDED_SPANS)
    n_spans = N_RANKS * rank_spans
    real = span_S < n_spans
    n_cells = tl.num_programs(0).to(tl.int64) * rank_spans
    # The spans of all ranks, in the order of the ranks.
    cell = span_S // rank_spans * (N_STATS * n_cells) + row * rank_spans + span_S % rank_spans
    top, tops, sums = _join_spans(stats_ptr, n_cells, cell, real, rate)
    policy_top, policy_sums = top, sums
    if N_STATS > 3:
        policy_top, _, policy_sums = _join_spans(stats_ptr + 3 * n_cells, n_cells, cell, real, rate)
    log_norm = tl.log(tl.sum(policy_sums, axis=0))
    best = tl.load(stats_int_ptr + 2 * n_cells + cell, mask=real, other=LAST_INT)
    best = tl.minimum(tl.min(tl.where(tops == top, best, LAST_INT), axis=0), whole_vocab - 1)

    least = tl.full([], -2147483648, tl.int32)
    n_equal = tl.full([], -1, tl.int32)
    n_before = tl.zeros([PADDED_SPANS], tl.int32)
    if FILTERED:
        n_equal = tl.load(bounds_ptr + tl.num_programs(0) + row)
        if n_equal >= 0:
            least = tl.load(bounds_ptr + row)
            equal = load_masked(equal_ptr + cell, real)
            n_before = tl.cumsum(equal, axis=0) - equal
            n_taken = tl.minimum(tl.maximum(n_equal - n_before, 0), equal)
            weight = tl.exp2((int_key_to_float(least) - top) * rate)
            weight = tl.where(n_taken > 0, weight, 0.0)  # if no equal logit is taken, `least` may not be a float's key
            sums = load_masked(kept_ptr + cell, real).to(tl.float64)
            sums += n_taken.to(tl.float64) * weight.to(tl.float64)

    running = tl.cumsum(sums, axis=0)
    span, target = _first_above(running, uniform * tl.max(running, axis=0))
    span = tl.minimum(span, n_spans - 1)

    own_span = span - rank * rank_spans
    lane = tl.arange(0, SPAN)
    index = own_span * SPAN + lane
    inside = (index >= 0) & (index < vocab)  # all False if another rank has the span
    x = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=float("-inf"))
    if HAS_TEXTS:
        x = tl.where(has_text(texts_ptr, rank * n_columns + index, inside), x, float("-inf"))
    weights = tl.where(inside, tl.exp2((x - top) * rate), 0.0)
    if FILTERED:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
        if n_equal >= 0:
            number = order_key(x)
            before = tl.sum(tl.where(span_S == span, n_before, 0), axis=0)
            is_equal = ((number == least) & inside).to(tl.int32)
            place = before + tl.cumsum(is_equal, axis=0) - is_equal
            is_kept = (number > least) | ((number == least) & (place < n_equal))
            weights = tl.where(is_kept, weights, 0.0)
    drawn, _ = _first_above(tl.cumsum(weights.to(tl.float64), axis=0), target)
    is_drawable = (
        tl.sum(tl.where(lane == drawn, weights, 0.0), axis=0) > 0
    )  # false for NaN, and if rounding gave an entry of weight 0
    takes_best = tl.load(greedy_ptr + slot) | (is_drawable == 0)
    token = tl.where(takes_best, best, tl.minimum(rank * n_columns + own_span * SPAN + drawn, whole_vocab - 1))
    chosen = tl.where(takes_best, top, tl.sum(tl.where(lane == drawn, x, 0.0), axis=0))
    if PENALIZED:
        count_ptr = counts_ptr + slot * vocab + token
        count = tl.load(count_ptr)
        chosen += tl.load(penalty_ptr + slot) * count.to(tl.float32)
        tl.store(count_ptr, count + 1)
    logprob = ((chosen - policy_top) / temperature).to(tl.float64) - log_norm
    if own_span < 0 or own_span >= rank_spans:  # another rank has the span
        tl.store(out_ptr + row, 0.0)
        tl.store(out_ptr + tl.num_programs(0) + row, 0.0)
    else:
        tl.store(out_ptr + row, token)
        tl.store(out_ptr + tl.num_programs(0) + row, logprob)
        tl.store(last_token_ptr + slot, token)
