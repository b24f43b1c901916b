# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Sampling from hidden states as Triton kernels: the LM head and the choice of a token, without logits in memory.

`_scan_hidden_kernel` computes a tile of logits, and writes two statistics of each span of the vocabulary: its maximum,
and the sum of exp((x - maximum) / temperature). From the span of the first id without a text on, each span gets two
more statistics, which leave such ids out, at the end of the row. `_draw_hidden_kernel` combines the spans of a row,
which gives the normaliser, finds the span of the sampled token, and computes the logits of this span again to find the
token. For a small hidden size, logits take longer to write and to read than to compute.

Launches depend on shapes alone, so a CUDA graph can capture them. D hidden size, S spans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from areno.kernels.backend import is_hopper
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64
from areno.kernels.matmul.triton import add_products
from areno.kernels.sampling.reference import SamplingSettings
from areno.kernels.sampling.triton import _ROW_POINTERS, LOG2_E, _first_above, _join_spans, _uniform, has_text

_SPAN, _INPUTS = 128, 64


def sample_hidden(
    hidden_BD: Tensor,
    weight_VD: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
) -> Tensor:
    """Sample one token for each row from the logits hidden W^T, without storing logits."""
    hidden_BD = hidden_BD.contiguous()
    (n_rows, n_inputs), vocab = hidden_BD.shape, len(weight_VD)
    n_spans, rows, is_half = triton.cdiv(vocab, _SPAN), 64 if n_rows <= 64 else 128, hidden_BD.element_size() == 2
    texts = settings.texts
    n_full = n_spans if texts is None else texts.n_first // _SPAN  # spans in which all ids have a text
    stats_2BS = hidden_BD.new_empty((2, n_rows, 2 * n_spans - n_full), dtype=torch.float32)
    words = None if texts is None else texts.words_W
    out_2B = hidden_BD.new_empty((2, n_rows), dtype=torch.float64)
    hidden, weight = hidden_BD, weight_VD
    # By TMA, the statistics of 256 to 1,024 rows take 10-17 % less time on an H200.
    if by_tma := rows == 128 and is_half and _can_use_tma(hidden_BD, weight_VD):
        hidden, weight = (
            TensorDescriptor.from_tensor(matrix, [size, _INPUTS])
            for matrix, size in ((hidden_BD, rows), (weight_VD, _SPAN))
        )
    # Programs that share a tile of the weight run one after another, while the tile is in the L2 cache.
    _scan_hidden_kernel[(triton.cdiv(n_rows, rows), n_spans)](
        hidden,
        weight,
        slots_B,
        settings.temperature,
        stats_2BS,
        words,
        n_full,
        n_rows,
        vocab,
        n_inputs,
        weight_VD.stride(0),
        HAS_TEXTS=texts is not None,
        ROWS=rows,
        SPAN=_SPAN,
        INPUTS=_INPUTS if is_half else 32,
        BY_TMA=by_tma,
        num_warps=4 if rows == 64 else 8,
        num_stages=3 if is_half else 2,  # more stages of fp32 do not fit into shared memory
    )
    _draw_hidden_kernel[(n_rows,)](
        hidden_BD,
        weight_VD,
        slots_B,
        positions_B,
        settings.key,
        settings.temperature,
        settings.greedy,
        settings.last_token,
        stats_2BS,
        words,
        out_2B,
        n_full,
        vocab,
        n_spans,
        n_inputs,
        weight_VD.stride(0),
        HAS_TEXTS=texts is not None,
        SPAN=_SPAN,
        PADDED_SPANS=triton.next_power_of_2(n_spans),
        INPUTS=_INPUTS,
        num_warps=8,
    )
    return out_2B


def _can_use_tma(*matrices: Tensor) -> bool:
    """Return whether TMA, the copy engine of Hopper GPUs, can copy tiles of all matrices to shared memory."""
    return is_hopper(matrices[0].device) and all(map(_is_aligned, matrices))


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows of a matrix begin at multiples of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) * matrix.element_size() % 16 == matrix.data_ptr() % 16 == 0


@kernel(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=_ROW_POINTERS)
def _scan_hidden_kernel(
    hidden_ptr,
    weight_ptr,
    slots_ptr,
    temperature_ptr,
    stats_ptr,
    texts_ptr,
    n_full,
    n_rows,
    vocab,
    n_inputs,
    stride,
    HAS_TEXTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    INPUTS: tl.constexpr,
    BY_TMA: tl.constexpr,
):
    """Compute a tile of logits and its statistics. With BY_TMA, hidden states and weight are TMA descriptors."""
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    span = tl.program_id(1)
    column = span * SPAN + tl.arange(0, SPAN)
    real_row, real_column = row < n_rows, column < vocab
    x = tl.zeros([ROWS, SPAN], tl.float32)
    if BY_TMA:
        for start in range(0, n_inputs, INPUTS):
            x = tl.dot(hidden_ptr.load([first_row, start]), weight_ptr.load([span * SPAN, start]).T, acc=x)
    else:
        hidden_place = hidden_ptr + row.to(tl.int64)[:, None] * n_inputs
        weight_place = weight_ptr + column.to(tl.int64)[None, :] * stride
        x = add_products(x, hidden_place, weight_place, real_row, real_column, n_inputs, INPUTS)
    x = tl.where(real_column[None, :], x, float("-inf"))
    slot = load_masked(slots_ptr + row, real_row)
    rate = LOG2_E / tl.load(temperature_ptr + slot)
    top = tl.max(x, axis=1)
    total = tl.sum(tl.exp2((x - top[:, None]) * rate[:, None]), axis=1)
    n_spans = tl.num_programs(1)
    width = 2 * n_spans - n_full
    n_cells = n_rows.to(tl.int64) * width
    cell = row.to(tl.int64) * width + span
    tl.store(stats_ptr + cell, top, mask=real_row)
    tl.store(stats_ptr + n_cells + cell, total, mask=real_row)
    if HAS_TEXTS:  # noqa: SIM102 (decided when the kernel is compiled)
        if span >= n_full:
            x = tl.where(has_text(texts_ptr, column, real_column)[None, :], x, float("-inf"))
            top = tl.max(x, axis=1)
            # If all x are -inf, the sum is 0. Without `tl.where` it would be NaN.
            least = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(tl.exp2((x - least[:, None]) * rate[:, None]), axis=1)
            cell += n_spans - n_full
            tl.store(stats_ptr + cell, top, mask=real_row)
            tl.store(stats_ptr + n_cells + cell, total, mask=real_row)


@kernel(do_not_specialize_on_alignment=_ROW_POINTERS)
def _draw_hidden_kernel(
    hidden_ptr,
    weight_ptr,
    slots_ptr,
    positions_ptr,
    key_ptr,
    temperature_ptr,
    greedy_ptr,
    last_token_ptr,
    stats_ptr,
    texts_ptr,
    out_ptr,
    n_full,
    vocab,
    n_spans,
    n_inputs,
    stride,
    HAS_TEXTS: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED_SPANS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = program_id_64(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    rate = LOG2_E / temperature
    uniform = _uniform(tl.load(key_ptr + slot), tl.load(positions_ptr + row))

    span_S = tl.arange(0, PADDED_SPANS)
    width = 2 * n_spans - n_full
    n_cells = tl.num_programs(0).to(tl.int64) * width
    cell = row * width + span_S
    is_span = span_S < n_spans
    top, tops, sums = _join_spans(stats_ptr, n_cells, cell, is_span, rate)
    policy_top, policy_sums = top, sums
    if HAS_TEXTS:
        cell += tl.where(span_S >= n_full, n_spans - n_full, 0)
        top, tops, sums = _join_spans(stats_ptr, n_cells, cell, is_span, rate)
    running = tl.cumsum(sums, axis=0)
    span, target = _first_above(running, uniform * tl.max(running, axis=0))
    span = tl.minimum(span, n_spans - 1)
    is_greedy = tl.load(greedy_ptr + slot)
    best_span = tl.min(tl.where(tops == top, span_S, n_spans - 1), axis=0)
    span = tl.where(is_greedy, best_span, span)

    lane = tl.arange(0, SPAN)
    index = span * SPAN + lane
    inside = index < vocab
    place = weight_ptr + index.to(tl.int64)[:, None] * stride
    x = tl.zeros([SPAN], tl.float32)
    for start in range(0, n_inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        is_input = at < n_inputs
        hidden = load_fp32(hidden_ptr + row * n_inputs + at, is_input)
        weight = load_fp32(place + at[None, :], inside[:, None] & is_input[None, :])
        x += tl.sum(weight * hidden[None, :], axis=1)
    if HAS_TEXTS:
        inside = has_text(texts_ptr, index, inside)
    x = tl.where(inside, x, float("-inf"))
    weights = tl.exp2((x - top) * rate)
    drawn, _ = _first_above(tl.cumsum(weights.to(tl.float64), axis=0), target)
    # Rounding may give an entry of weight 0. Then, and for NaN, the most likely token of the span is taken.
    is_drawable = tl.sum(tl.where(lane == drawn, weights, 0.0), axis=0) > 0
    best = tl.minimum(tl.min(tl.where(x == tl.max(x, axis=0), lane, SPAN), axis=0), SPAN - 1)
    drawn = tl.where(is_greedy | (is_drawable == 0), best, drawn)
    token = tl.minimum(span * SPAN + drawn, vocab - 1)
    chosen = tl.sum(tl.where(lane == drawn, x, 0.0), axis=0)
    tl.store(out_ptr + row, token)
    tl.store(
        out_ptr + tl.num_programs(0) + row,
        ((chosen - policy_top) / temperature).to(tl.float64) - tl.log(tl.sum(policy_sums, axis=0)),
    )
    tl.store(last_token_ptr + slot, token)
