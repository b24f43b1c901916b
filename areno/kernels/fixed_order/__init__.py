"""Attention in a fixed order of operations, so that a query's result does not depend on the batch (`engine.exact`).

Keys are taken in spans that begin at fixed positions: at 0, 64, 128, and at the multiples of SPAN. The order within a
span is fixed, and the results of spans are combined from the first to the last (running softmax, arXiv 1805.02867). So
the result of a query is exactly the same in training, in a whole or chunked prefill, and in a decoding step, whatever
else is in the batch. The torch reference and the Triton kernels each have their own order. Neither runs under autograd.

Packed rows and `window` are those of `areno.kernels.attention`. Shape letters: N query tokens, M key tokens, H query
heads, K key heads, C head dimension; R packed sequences (rows).
"""

from __future__ import annotations

from areno.kernels.backend import dispatch_by_device
from areno.kernels.fixed_order import reference
from areno.kernels.fixed_order.reference import SPAN, n_spans, padded_attention, row_multiple, span_start

__all__ = ["SPAN", "n_spans", "packed_attention", "padded_attention", "row_multiple", "span_start"]

packed_attention = dispatch_by_device(reference.packed_attention)
"""Return the output (N, H, C), and the log-sum-exp of scaled scores (H, N) in float32, or None from plain torch."""
