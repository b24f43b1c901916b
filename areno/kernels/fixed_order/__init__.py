"""Attention in a fixed order of operations, so that a query's result does not depend on the batch (`engine.exact`).

Keys are taken in spans that begin at fixed positions: at 0, 64, 128, and at the multiples of SPAN. The order within a
span is fixed, and the results of spans are combined from the first to the last (running softmax, arXiv 1805.02867). So
the result of a query is exactly the same in training, in a whole or chunked prefill, and in a decoding step, whatever
else is in the batch. The torch reference and the Triton kernels each have their own order.

Shape letters: N query tokens, M key tokens, H query heads, K key heads, C head dimension; R packed sequences (rows).
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
    """Compute causal attention of packed sequences (rows) in a fixed order, outside autograd.

    Args:
        q_NHC: queries of all rows, packed, shape (query tokens, heads, head dim).
        k_MKC: keys of all rows, packed. If a row has more keys than queries, its queries are its last tokens.
        v_MKC: values of all rows, packed in the same way.
        cu_seqlens_q: (rows + 1,) int32, cumulative numbers of queries, from 0 to N.
        cu_seqlens_k: (rows + 1,) int32, cumulative numbers of keys, from 0 to M.
        max_q: largest number of queries in a row.
        window: size of the sliding window: a query attends to its own and the `window` - 1 previous positions. None
            means full causal attention.

    Returns:
        The output (N, H, C), and the log-sum-exp of the scaled scores (H, N) in float32. The latter is None from the
        torch reference, which runs on a CPU.
    """
    return form(q_NHC, __name__).packed_attention(q_NHC, k_MKC, v_MKC, cu_seqlens_q, cu_seqlens_k, max_q, window)
