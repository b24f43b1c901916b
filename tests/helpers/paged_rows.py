"""Queries and pages of keys and values for decode attention, in random order and with shared prefixes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areno.kernels.paged import PagedBatch

SHAPES = [  # query heads, key heads, head dim, page size
    (4, 2, 64, 16),
    (8, 8, 32, 32),
    (6, 1, 24, 7),
    (16, 2, 128, 64),
]


# Lengths of the rows, and which of them share how many pages: (rows, pages).
LENGTHS = [1, 5, 150, 64, 65, 16, 140, 133, 17, 151]


GROUPS = [((1, 2, 4), 1), ((6, 3), 3), ((7, 9), 8)]


GROUP_ROWS = 2


Case = tuple[Tensor, Tensor, Tensor, Tensor, PagedBatch]


def make_case(
    heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Case:
    """Rows of LENGTHS with their pages in random order; what lies outside a row's own positions is huge.

    A row is in a group with as many pages as fit below its length; those that have too few stay out of it.
    """
    gen = torch.Generator().manual_seed(dim)
    n_rows, n_slots = len(LENGTHS), len(LENGTHS) + 3
    width = -(-max(LENGTHS) // page_size) + 2
    pages = torch.full((2, n_slots * width, page_size, kv_heads, dim), 1e3)
    slots = torch.randperm(n_slots, generator=gen)[:n_rows]
    table = torch.randperm(n_slots * width, generator=gen).view(n_slots, width).int()
    shared, groups = torch.zeros(n_rows, dtype=torch.int64), []
    for group, n_pages in GROUPS:
        rows = [row for row in group if LENGTHS[row] > n_pages * page_size]
        for row in rows:
            table[slots[row], :n_pages] = table[slots[rows[0]], :n_pages]
            shared[row] = n_pages * page_size
        groups += [rows[i : i + GROUP_ROWS] for i in range(0, len(rows), GROUP_ROWS)]
    # A group of no rows between the others, as where a batch is filled up.
    prefix_groups_GR = torch.tensor(
        [[-1] * GROUP_ROWS, *(group + [-1] * (GROUP_ROWS - len(group)) for group in groups), [-1] * GROUP_ROWS]
    )
    for slot, length in zip(slots.tolist(), LENGTHS, strict=True):
        for position in range(length - 1):
            page = table[slot, position // page_size]
            pages[:, page, position % page_size] = torch.randn(2, kv_heads, dim, generator=gen)
    q, k, v = (torch.randn(n_rows, n, dim, generator=gen).to(device, dtype) for n in (heads, kv_heads, kv_heads))
    batch = PagedBatch(
        table_TW=table.to(device),
        slots_B=slots.to(device),
        lengths_B=torch.tensor(LENGTHS, device=device),
        shared_lens_B=shared.to(device),
        split_lens=torch.tensor([512, 512], device=device),
        prefix_groups_GR=prefix_groups_GR.to(device),
    )
    return q, k, v, pages.to(device, dtype), batch


def cut_into(batch: PagedBatch, own_split_len: int, shared_split_len: int) -> PagedBatch:
    """With as many splits as these spans take, and one more."""
    splits = tuple(-(-max(LENGTHS) // span) + 1 for span in (own_split_len, shared_split_len))
    split_lens = torch.tensor([own_split_len, shared_split_len], device=batch.split_lens.device)
    return replace(batch, split_lens=split_lens, splits=splits)
