"""The torch form, for the CPU.

A row of a matrix product has the same bits beside any others if there are ROWS rows or a multiple of it.

Shape letters: B rows of queries, H query heads, K key heads, L queries and M keys of a row, C head dimension; X pairs
of a row and a key head; P queries of the heads that share a key head, padded.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.padding import by_padding

_Ints = TypeVar("_Ints", int, np.ndarray)

SPAN = 256  # positions; the first ones are shorter, so that short prompts, too, have whole spans to share
_SHORT = 64, 128  # where the spans before the first multiple of SPAN begin, beside 0
ROWS = 16  # for each thread; with fewer, MKL has other kernels


def border(span: int) -> int:
    """The position at which a span begins: 0, 64, 128, 256, 512, 768 and so on."""
    return (0, *_SHORT)[span] if span <= len(_SHORT) else (span - len(_SHORT)) * SPAN


def n_spans(length: _Ints) -> _Ints:
    """How many spans begin before position `length`, or before each of them."""
    return sum(length > start for start in _SHORT) - (-length // SPAN)


def row_multiple() -> int:
    """What the number of rows of a product must be a multiple of, on the CPU."""
    return ROWS * torch.get_num_threads()


def packed_attention(
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    window: int | None = None,
) -> tuple[Tensor, None]:
    """As `areno.kernels.spans.packed_attention`."""
    attend = partial(causal, window=window)
    return by_padding(q_NHC, k_MKC, v_MKC, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), attend), None


def causal(q_BHLC: Tensor, k_BKMC: Tensor, v_BKMC: Tensor, window: int | None = None) -> Tensor:
    """(B, H, L, C) for queries that are the last L of M positions."""
    n_q, n_k = q_BHLC.shape[2], k_BKMC.shape[2]
    return by_spans(q_BHLC, k_BKMC, v_BKMC, torch.arange(n_k - n_q, n_k).expand(len(q_BHLC), -1), window)


def by_spans(q_BHLC: Tensor, k_BKMC: Tensor, v_BKMC: Tensor, positions_BL: Tensor, window: int | None = None) -> Tensor:
    """softmax(q k / sqrt(C)) v over the positions up to that of the query: (B, H, L, C). Keys beyond must be finite.

    positions_BL: int64, of the queries; key m of a row is at position m. window: how many positions a query sees, the
    last ones; keys before them must be finite, too.
    """
    n_rows, n_heads, n_q, dim = q_BHLC.shape
    n_kv_heads = k_BKMC.shape[1]
    shared = n_heads // n_kv_heads
    spans = n_spans(k_BKMC.shape[2])
    more_q, more_k = -(shared * n_q) % row_multiple(), border(spans) - k_BKMC.shape[2]
    # The query heads that share a key head are rows of one product.
    q_XPC = F.pad((q_BHLC * dim**-0.5).reshape(n_rows * n_kv_heads, shared * n_q, dim), (0, 0, 0, more_q))
    # Whole spans, and no more: to fill up a cache of few positions would take most of the time.
    k_XMC, v_XMC = (F.pad(x.flatten(0, 1), (0, 0, 0, more_k)).contiguous() for x in (k_BKMC, v_BKMC))
    positions_XP1 = F.pad(positions_BL.repeat(1, shared), (0, more_q)).repeat_interleave(n_kv_heads, 0).unsqueeze(-1)
    best = q_XPC.new_full((*q_XPC.shape[:2], 1), -torch.inf)
    total, acc = torch.zeros_like(best), torch.zeros_like(q_XPC)
    for index in range(spans):
        span = slice(border(index), border(index + 1))
        places = torch.arange(span.start, span.stop)
        hidden = places > positions_XP1
        if window is not None:
            hidden |= places <= positions_XP1 - window
        scores = torch.bmm(q_XPC, k_XMC[:, span].transpose(1, 2)).masked_fill_(hidden, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        # Without a window the first span has a key for every query. Behind one, nothing may have been seen yet.
        origin = new_best if window is None else new_best.masked_fill(new_best == -torch.inf, 0.0)
        weights = (scores - origin).exp_()
        decay = (best - origin).exp_()
        acc = acc * decay + torch.bmm(weights, v_XMC[:, span])
        total = total * decay + weights.sum(-1, keepdim=True)
        best = new_best
    return (acc / total)[:, : shared * n_q].reshape(n_rows, n_heads, n_q, dim)
