"""Attention over packed rows by torch's scaled_dot_product_attention, which takes padded batches.

It is the form of the CPU, of float32, and of GPUs without flash attention.

Shape letters as in `areno/kernels/padding.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.padding import by_padding


def sdpa_attention(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    starts_q: list[int],
    starts_k: list[int],
    window: int | None = None,
) -> Tensor:
    """Causal attention of each row's queries to its own keys, the last `window` of them: (N, H, D)."""
    return by_padding(q_NHD, k_MKD, v_MKD, starts_q, starts_k, partial(_sdpa, window=window))


def _sdpa(q_BHLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, window: int | None) -> Tensor:
    n_q, n_k = q_BHLD.shape[2], k_BKLD.shape[2]
    mask = None
    if window is not None and window >= n_k:
        window = None
    if window is not None or 1 < n_q < n_k:
        mask = torch.ones(n_q, n_k, dtype=torch.bool, device=q_BHLD.device).tril(n_k - n_q)
        if window is not None:
            mask = mask.triu(n_k - n_q + 1 - window)
    enable_gqa = q_BHLD.shape[1] != k_BKLD.shape[1]
    if enable_gqa and q_BHLD.is_cuda:
        # Grouped heads would run the form that holds all scores at once. The memory-efficient kernel has no groups.
        k_BKLD, v_BKLD = (_each_head(x, q_BHLD.shape[1]) for x in (k_BKLD, v_BKLD))
        enable_gqa = False
    return F.scaled_dot_product_attention(
        q_BHLD, k_BKLD, v_BKLD, attn_mask=mask, is_causal=mask is None and n_q == n_k, enable_gqa=enable_gqa
    )


def _each_head(x_BKLD: Tensor, n_heads: int) -> Tensor:
    """Repeat each key head for the query heads that share it: (B, H, L, D)."""
    return x_BKLD.repeat_interleave(n_heads // x_BKLD.shape[1], dim=1)
