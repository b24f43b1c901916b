"""Attention of packed sequences (rows) by functions that take padded batches.

Rows are packed as in `areno.kernels.attention`. N query tokens, M key tokens, H query heads, K key heads, D head
dimension; T tokens of the B rows in one padded batch of length L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

SHORT_ROW = 64  # tokens; another kernel launch is not worth it if it saves less padding than this per row


class CuSeqlens(NamedTuple):
    """Cumulative numbers of queries and of keys in packed rows, int32, and the largest numbers in one row."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int


def attend_padded(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    borders: CuSeqlens,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Compute attention with `attend`, which takes padded q, k and v (B, heads, L, D) and positions.

    The positions are those of each row's first query, (B,) int64, or None if they are 0 for all rows. Rows of similar
    length share a call, since many short calls cost more than some padding.
    """
    outs: list[Tensor] = []
    starts_q, starts_k = (tuple(starts.tolist()) for starts in borders[:2])
    batches = _padded_batches(starts_q, starts_k, q_NHD.device)
    for place_q, place_k, firsts_B in batches:
        q_THD, k_THD, v_THD = q_NHD, k_MKD, v_MKD
        if place_q.n_rows < len(starts_q) - 1:  # otherwise the batch has all rows, in their order
            q_THD = q_NHD.index_select(0, place_q.tokens_T)
            k_THD, v_THD = k_MKD.index_select(0, place_k.tokens_T), v_MKD.index_select(0, place_k.tokens_T)
        outs.append(place_q.unpad(attend(place_q.pad(q_THD), place_k.pad(k_THD), place_k.pad(v_THD), firsts_B)))
    if len(outs) == 1:
        return outs[0]
    if not outs:
        return torch.zeros_like(q_NHD)
    order = torch.cat([place_q.tokens_T for place_q, _, _ in batches])
    return torch.cat(outs).index_select(0, order.argsort())


@lru_cache(maxsize=2)  # all layers of a pass have the same rows
def _padded_batches(
    starts_q: tuple[int, ...], starts_k: tuple[int, ...], device: torch.device
) -> list[tuple[_Padding, _Padding, Tensor | None]]:
    """Return, for each batch, the padding of the queries, that of the keys, and the positions for `attend`."""
    found: list[tuple[_Padding, _Padding, Tensor | None]] = []
    for rows in _group_by_length(starts_q, starts_k):
        lengths_q = [starts_q[row + 1] - starts_q[row] for row in rows]
        lengths_k = [starts_k[row + 1] - starts_k[row] for row in rows]
        place_q = place_k = _Padding([starts_q[row] for row in rows], lengths_q, device)
        if starts_q != starts_k:
            place_k = _Padding([starts_k[row] for row in rows], lengths_k, device)
        firsts_B = None
        if lengths_q != lengths_k:
            firsts_B = torch.tensor(lengths_k, device=device) - torch.tensor(lengths_q, device=device)
        found.append((place_q, place_k, firsts_B))
    return found


def _group_by_length(starts_q: Sequence[int], starts_k: Sequence[int]) -> list[list[int]]:
    """Return the row indices of each padded batch, ascending.

    The rows of a batch have similar numbers of queries and of keys. Rows with as many queries as keys are in batches of
    their own, because a simpler mask is enough for them.
    """
    lengths = [
        (starts_q[row + 1] - starts_q[row], starts_k[row + 1] - starts_k[row]) for row in range(len(starts_q) - 1)
    ]
    batches: list[list[int]] = []
    for is_whole in (False, True):
        left = [row for row, (n_q, n_k) in enumerate(lengths) if n_q and (n_q == n_k) == is_whole]
        left.sort(key=lambda row: lengths[row], reverse=True)
        while left:
            most_q, most_k = lengths[left[0]]
            batch = [
                row
                for row in left
                if _has_similar_length(lengths[row][0], most_q) and _has_similar_length(lengths[row][1], most_k)
            ]
            batches.append(sorted(batch))
            taken = set(batch)
            left = [row for row in left if row not in taken]
    return batches


def _has_similar_length(length: int, longest: int) -> bool:
    """Return whether padding to the longest row of a batch is cheaper than another call."""
    return min(longest * 3 // 4, longest - SHORT_ROW) <= length <= longest


class _Padding:
    """Converts the tokens of B rows between packed tensors (T, heads, D) and padded batches (B, heads, L, D)."""

    def __init__(self, starts: list[int], lengths: list[int], device: torch.device):
        n_rows, longest = self.shape = len(starts), max(lengths)
        self.n_rows = n_rows
        self.ragged = min(lengths) < longest
        lengths_B = torch.tensor(lengths)
        within_BL = torch.arange(longest).expand(n_rows, longest)
        real_BL = within_BL < lengths_B.unsqueeze(1)
        tokens_BL = torch.tensor(starts).unsqueeze(1) + within_BL
        self.tokens_T = tokens_BL[real_BL].to(device)
        self.slots_T = real_BL.flatten().nonzero().squeeze(1).to(device)

    def pad(self, x_THD: Tensor) -> Tensor:
        if self.ragged:
            n_rows, longest = self.shape
            x_THD = x_THD.new_zeros(n_rows * longest, *x_THD.shape[1:]).index_copy(0, self.slots_T, x_THD)
        return x_THD.reshape(*self.shape, *x_THD.shape[1:]).transpose(1, 2)

    def unpad(self, x_BHLD: Tensor) -> Tensor:
        x_THD = x_BHLD.transpose(1, 2).flatten(0, 1)
        return x_THD.index_select(0, self.slots_T) if self.ragged else x_THD
