"""Attention in a fixed order of operations, whatever else is computed beside a query; `engine.exact` uses it.

Keys are taken in spans that begin at fixed positions: at 0, 64, 128, and at the multiples of SPAN. The order within a
span is fixed, and spans are joined from the first to the last (running softmax, arXiv 1805.02867). So the result of a
query is exactly the same in training, in a whole or chunked prefill, and in a decode step. The torch form and the
Triton kernels each have their own order.

Shape letters: N query tokens, M key tokens, H query heads, K key heads, C head dimension; R packed rows.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.backend import form
from areno.kernels.fixed_order.reference import SPAN, border, n_spans, padded_attention, row_multiple

__all__ = ["SPAN", "border", "n_spans", "packed_attention", "padded_attention", "row_multiple"]


def packed_attention(
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute causal attention of packed rows in a fixed order, outside autograd.

    Args:
        q_NHC: queries of all rows, packed.
        k_MKC: keys of all rows. A row with more keys than queries has its queries at the end.
        v_MKC: values of all rows.
        cu_seqlens_q: (R + 1,) int32, where the queries of each row begin, and N.
        cu_seqlens_k: (R + 1,) int32, where the keys of each row begin, and M.
        max_q: the most queries of a row.
        window: the number of last positions that a query attends to. None: all.

    Returns:
        The output (N, H, C), and the log-sum-exp of the scores (H, N) float32 from the Triton kernels, None from torch.
    """
    return form(q_NHC, __name__).packed_attention(q_NHC, k_MKC, v_MKC, cu_seqlens_q, cu_seqlens_k, max_q, window)
