"""Fixed-order attention in plain torch, for the CPU, and the positions at which its spans of keys begin.

Before a product, the number of rows of a matrix is padded to a multiple of `row_multiple()`. The CPU's matrix library
then computes each row in the same way, whatever the other rows are.

B rows of queries, L queries and M keys of a row; X pairs of a row and a key head; P queries of the heads that share a
key head, padded.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.padding import CuSeqlens, attend_padded

_Ints = TypeVar("_Ints", int, np.ndarray)

SPAN = 256  # positions in a span; the first three are shorter, so that a short shared prompt has whole spans, too
_SHORT = 64, 128  # where the second and third span begin; the first begins at 0
ROWS = 16  # of a product for each CPU thread; with fewer rows, MKL uses other kernels


def span_start(span: int) -> int:
    """Return the first position of a span of keys: 0, 64, 128, 256, 512, 768 and so on."""
    return (0, *_SHORT)[span] if span <= len(_SHORT) else (span - len(_SHORT)) * SPAN


def n_spans(length: _Ints) -> _Ints:
    """Return the number of spans of keys that cover the first `length` positions. The last may be covered in part."""
    return sum(length > start for start in _SHORT) - (-length // SPAN)


def row_multiple() -> int:
    return ROWS * torch.get_num_threads()


def packed_attention(
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    borders: CuSeqlens,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    attend = partial(causal_attention, window=window, sinks_H=sinks_H)
    return attend_padded(q_NHC, k_MKC, v_MKC, borders, attend), None


def causal_attention(
    q_BHLC: Tensor,
    k_BKMC: Tensor,
    v_BKMC: Tensor,
    firsts_B: Tensor | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute attention of padded rows. `firsts_B` is the position of each row's first query, None for 0."""
    positions_BL = torch.arange(q_BHLC.shape[2]).expand(len(q_BHLC), -1)
    if firsts_B is not None:
        positions_BL = positions_BL + firsts_B.unsqueeze(1)
    return padded_attention(q_BHLC, k_BKMC, v_BKMC, positions_BL, window, sinks_H)


def padded_attention(
    q_BHLC: Tensor,
    k_BKMC: Tensor,
    v_BKMC: Tensor,
    positions_BL: Tensor,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute attention of the queries at `positions_BL` of padded rows.

    Keys that no query attends to, and their values, must be finite.
    """
    n_rows, n_heads, n_q, dim = q_BHLC.shape
    n_kv_heads = k_BKMC.shape[1]
    shared = n_heads // n_kv_heads
    spans = n_spans(k_BKMC.shape[2])
    more_q, more_k = -(shared * n_q) % row_multiple(), span_start(spans) - k_BKMC.shape[2]
    # Query heads that share a key head are rows of one product.
    q_XPC = F.pad((q_BHLC * dim**-0.5).reshape(n_rows * n_kv_heads, shared * n_q, dim), (0, 0, 0, more_q))
    # Pad to whole spans, not further: a longer padding would take most of the time of short rows.
    k_XMC, v_XMC = (F.pad(x.flatten(0, 1), (0, 0, 0, more_k)).contiguous() for x in (k_BKMC, v_BKMC))
    positions_XP1 = F.pad(positions_BL.repeat(1, shared), (0, more_q)).repeat_interleave(n_kv_heads, 0).unsqueeze(-1)
    best = q_XPC.new_full((*q_XPC.shape[:2], 1), -torch.inf)
    total, acc = torch.zeros_like(best), torch.zeros_like(q_XPC)
    for index in range(spans):
        span = slice(span_start(index), span_start(index + 1))
        keys = torch.arange(span.start, span.stop)
        hidden = keys > positions_XP1
        if window is not None:
            hidden |= keys <= positions_XP1 - window
        scores = torch.bmm(q_XPC, k_XMC[:, span].transpose(1, 2)).masked_fill_(hidden, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        # With a window, a query may attend to no key of the first spans. The query's maximum is then still -inf.
        origin = new_best if window is None else new_best.masked_fill(new_best == -torch.inf, 0.0)
        weights = (scores - origin).exp_()
        decay = (best - origin).exp_()
        acc = acc * decay + torch.bmm(weights, v_XMC[:, span])
        total = total * decay + weights.sum(-1, keepdim=True)
        best = new_best
    if sinks_H is not None:
        sinks_XP = F.pad(sinks_H.to(acc.dtype).view(n_kv_heads, -1).repeat_interleave(n_q, 1), (0, more_q))
        total = total + (sinks_XP.repeat(n_rows, 1).unsqueeze(-1) - best).exp_()
    return (acc / total)[:, : shared * n_q].reshape(n_rows, n_heads, n_q, dim)
