# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Fixed-order attention of packed sequences (rows) as a Triton kernel, and functions that decoding steps use, too.

`kernels/paged/triton_fixed_order.py` has the kernels of decoding steps. They give exactly the same result as the kernel
here, because the order of operations is fixed. Tiles of TILE keys are taken in order within a span of keys, each span
begins with an empty softmax, and the results of spans are combined in order. Sums over keys are matrix products, as the
order of `tl.sum` depends on the layout of a tile. Multiply-adds are written out, as a compiler may fuse them in one
kernel and not in another.

Because a matrix unit computes each element by itself, three things may differ: how many queries share a program,
whether queries are the rows or the columns of a product, and whether one program combines the first spans itself or a
second kernel combines spans from several programs.

Shape letters as in `areno/kernels/fixed_order`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.fixed_order.reference import SPAN
from areno.kernels.jit import kernel, load_masked
from areno.kernels.padding import CuSeqlens

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(0.6931471805599453)
_SPAN = tl.constexpr(SPAN)
TILE = tl.constexpr(64)  # keys loaded together, a power of two that divides all spans
_ONES = tl.constexpr(16)  # columns of ones: a product with them sums the rows of a tile
_QUERIES, _QUERY_WARPS = 64, 4  # of one program; the fastest on an H200


def packed_attention(
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    borders: CuSeqlens,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    q_NHC, k_MKC, v_MKC = (with_contiguous_heads(x) for x in (q_NHC, k_MKC, v_MKC))
    n_tokens, n_heads, dim = q_NHC.shape
    out_NHC = q_NHC.new_empty((n_tokens, n_heads, dim))
    log_sum_HN = q_NHC.new_empty((n_heads, n_tokens), dtype=torch.float32)
    if n_tokens:
        _packed_kernel[(triton.cdiv(borders.max_q, _QUERIES), n_heads, len(borders.cu_seqlens_q) - 1)](
            q_NHC,
            k_MKC,
            v_MKC,
            *borders[:2],
            sinks_H,
            out_NHC,
            log_sum_HN,
            dim**-0.5 * LOG2_E,
            q_NHC.stride(0),
            k_MKC.stride(0),
            v_MKC.stride(0),
            n_tokens,
            HEADS_PER_KEY=n_heads // k_MKC.shape[1],
            QUERIES=_QUERIES,
            DIM=dim,
            PADDED_DIM=max(16, triton.next_power_of_2(dim)),
            WINDOW=window,
            num_warps=_QUERY_WARPS,
            num_stages=2,
        )
    return out_NHC, log_sum_HN


def with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def span_start(span):
    """Return the first position of the span of keys with index `span`: 0, 64, 128, 256, 512, 768 and so on."""
    return tl.where(span < 3, span * 64, (span - 2) * _SPAN)


@triton.jit
def n_spans(length):
    """Return the number of spans of keys that cover the first `length` positions of a row."""
    return tl.where(length <= 128, (length + 63) // 64, 2 + (length + _SPAN - 1) // _SPAN)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return the running softmax over no keys: the largest score, the sum of weights and the weighted sum of values."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def add_tile(q, k, v, visible, best, total, acc, rate):
    """Add a tile of TILE keys, transposed (C, TILE), to a running softmax.

    `best` is the largest score so far, `total` the sum of weights, the same in all _ONES columns, and `acc` the
    weighted sum of values. `rate` is log2(e) / sqrt(C), the factor of scores.
    """
    scores = tl.dot(q, k, input_precision="ieee")
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shift, decay = rescale_factors(best, new_best, rate)
    weights = tl.exp2(tl.fma(scores, rate, shift[:, None])).to(v.dtype)
    acc = tl.dot(weights, v, acc=acc * decay[:, None], input_precision="ieee")
    ones = tl.full([TILE, _ONES], 1.0, v.dtype)
    total = tl.dot(weights, ones, acc=total * decay[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def rescale_factors(best, new_best, rate):
    """Return the (shift, decay) of a running softmax whose largest score grows from `best` to `new_best`.

    New weights are exp2(score * rate + shift). Sums that were computed with `best` are multiplied by decay.
    """
    origin = tl.where(new_best == float("-inf"), 0.0, new_best)
    return 0.0 - origin * rate, tl.exp2((best - origin) * rate)


@triton.jit
def join_spans(best, total, span_best, span_total, rate):
    """Combine the softmax over a span of keys with the softmax over all earlier spans.

    The results are (largest score, sum of weights, a, b). If x is the weighted sum of values over the earlier spans and
    y that over the span, the joint sum is a x + b y.
    """
    new_best = tl.maximum(best, span_best)
    decay, weight = rescale_factors(best, new_best, rate)[1], rescale_factors(span_best, new_best, rate)[1]
    return new_best, tl.fma(total, decay, span_total * weight), decay, weight


@triton.jit
def total_with_sink(sinks_ptr, head, real, best, total, rate):
    """Return the sum of weights with the sinks of the heads. Without sinks, it is `total`."""
    if sinks_ptr is None:
        return total
    else:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32)
        return total + tl.exp2(tl.fma(best, 0.0 - rate, sink * _LOG2_E))


@kernel
def _packed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_q_ptr,
    starts_k_ptr,
    sinks_ptr,
    out_ptr,
    log_sum_ptr,
    rate,
    q_stride,
    k_stride,
    v_stride,
    n_tokens,
    HEADS_PER_KEY: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """In each program, compute QUERIES queries of a row, for one head. Programs with the most keys start first."""
    head, row = tl.program_id(1), tl.program_id(2)
    start_q, start_k = tl.load(starts_q_ptr + row).to(tl.int64), tl.load(starts_k_ptr + row).to(tl.int64)
    n_q = (tl.load(starts_q_ptr + row + 1) - start_q).to(tl.int32)
    n_k = (tl.load(starts_k_ptr + row + 1) - start_k).to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first < n_q:
        query = first + tl.arange(0, QUERIES)
        position = n_k - n_q + query
        dim = tl.arange(0, PADDED_DIM)
        real_dim = dim < DIM
        real = (query < n_q)[:, None] & real_dim[None, :]
        token = start_q + query
        q = load_masked(q_ptr + token[:, None] * q_stride + head * DIM + dim[None, :], real)
        k_ptr += start_k * k_stride + head // HEADS_PER_KEY * DIM
        v_ptr += start_k * v_stride + head // HEADS_PER_KEY * DIM
        best, total, acc = empty_softmax(QUERIES, PADDED_DIM)
        end = tl.minimum(n_k, n_k - n_q + first + QUERIES)
        begin = 0
        if WINDOW is not None:  # begin at the first span in the window of the first query
            begin = n_spans(tl.maximum(n_k - n_q + first + 2 - WINDOW, 1)) - 1
        for span in range(begin, n_spans(end)):
            span_best = tl.full([QUERIES], float("-inf"), tl.float32)
            span_total = tl.zeros([QUERIES, _ONES], tl.float32)
            span_acc = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
            for tile in range(span_start(span), tl.minimum(span_start(span + 1), end), TILE):
                key = tile + tl.arange(0, TILE)
                inside = key < end
                at = key.to(tl.int64)
                mask = inside[None, :] & real_dim[:, None]
                k = load_masked(k_ptr + at[None, :] * k_stride + dim[:, None], mask)
                mask = inside[:, None] & real_dim[None, :]
                v = load_masked(v_ptr + at[:, None] * v_stride + dim[None, :], mask)
                visible = key[None, :] <= position[:, None]
                if WINDOW is not None:
                    visible &= key[None, :] > position[:, None] - WINDOW
                span_best, span_total, span_acc = add_tile(q, k, v, visible, span_best, span_total, span_acc, rate)
            best, total, decay, weight = join_spans(best, total, span_best, tl.max(span_total, axis=1), rate)
            acc = tl.fma(acc, decay[:, None], span_acc * weight[:, None])
        total = total_with_sink(sinks_ptr, head + 0 * query, query < n_q, best, total, rate)
        place = out_ptr + (token * tl.num_programs(1) + head)[:, None] * DIM + dim[None, :]
        tl.store(place, tl.div_rn(acc, total[:, None]), mask=real)
        log_sum = tl.fma(best, rate, tl.log2(total)) * _LN_2
        tl.store(log_sum_ptr + head.to(tl.int64) * n_tokens + token, log_sum, mask=query < n_q)
