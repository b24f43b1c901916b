"""Paged attention for a decoding step: one new token per row, with keys and values in blocks of the KV cache.

`kv_blocks` (2, P, S, K, C) are keys and values, changed in place. A row attends to its last `window` positions,
including the new token; earlier positions may hold any finite values.

With `exponents` (2, P, K, S) uint8, the blocks are an FP8 cache: codes, and a scale for the key and the value of each
position and head (`kernels/fp8`). New keys and values must be rounded to FP8 already, so writing and reading the cache
loses nothing. `sinks_H` are those of `areno.kernels.sinks`. They join the softmax once, when splits are combined.

Shape letters: B rows, H query heads, K key heads (H is a multiple of K), C head dimension; P blocks of S positions.
"""

from __future__ import annotations

from areno.kernels.backend import dispatch_by_device
from areno.kernels.paged import reference, rows
from areno.kernels.paged.reference import PagedBatch, max_group_rows

__all__ = ["PagedBatch", "decode_attention", "load_rows", "max_group_rows", "store_rows"]

decode_attention = dispatch_by_device(reference.decode_attention)
"""Write new keys and values at each row's last position, and return its attention over all its positions."""

store_rows = dispatch_by_device(rows.store_rows)
"""Write N keys and values at their indices in the cache, block * S + offset."""

load_rows = dispatch_by_device(rows.load_rows)
"""Return the keys and values at M indices of the cache, (M, K, C) each, dequantized to a dtype."""
