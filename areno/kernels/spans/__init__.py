"""Attention in one order of operations, whatever else is computed beside a query: what `engine.exact` runs.

Keys are taken in spans that begin at fixed positions: at 0, 64 and 128, and at the multiples of SPAN. Within a span
the order is fixed, and spans are joined from the first on (running softmax, arXiv 1805.02867). So the result for a
query has the same bits in training, in a whole or chunked prefill, and in a decode step. The torch form and the Triton
kernels each have an order of their own.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.backend import form
from areno.kernels.spans.reference import SPAN, border, by_spans, n_spans, row_multiple

__all__ = ["SPAN", "border", "by_spans", "n_spans", "packed_attention", "row_multiple"]


def packed_attention(
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of packed rows, outside autograd; arguments as of `kernels.attention.varlen_attention`.

    Returns (N, H, C), and from the Triton kernels the log-sum-exp of the scores as (H, N) float32.
    """
    return form(q_NHC, __name__).packed_attention(q_NHC, k_MKC, v_MKC, cu_seqlens_q, cu_seqlens_k, max_q, window)
