"""Split-KV planning for a decode step: how the attention is divided so that all multiprocessors are busy. No tensors.

Batch rows whose prompts lie in the same KV blocks form a shared-prefix group. The kernel reads the shared blocks
once for the whole group. The shared positions of each group, and the remaining positions of each row, are cut into
splits (ranges of consecutive positions), which the kernel computes in parallel. The length of a split depends on the
number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from areno.engine.decoder.sequence import Sequence
from areno.kernels.fixed_order import SPAN, n_spans, span_start

MIN_SAVING = 16  # positions per row of the batch that groups must save on average to be used
_MIN_SPLIT_LEN, _MAX_SPLITS = 64, 16
_MAX_OWN_SPLIT_LEN, _MAX_SHARED_SPLIT_LEN = 256, 512  # rows' own lengths differ, and short splits balance them better
_SPLITS_PER_MULTIPROCESSOR = 2  # of own positions, and as many of shared ones
# Up to this length a shared split is twice as long as that asks for: every row combines the results of its splits. On
# an H200, 256 shared positions of 32 groups take 55.0 us instead of 58.6 (8 key heads), and 31.8 instead of 33.8 (4 key
# heads).
_SHORT_SHARED_SPLIT_LEN = 256


@dataclass(slots=True)
class PrefixGroups:
    """The shared-prefix groups of a batch. Without sliding windows, they hold while the batch has the same rows."""

    shared_lens_B: np.ndarray
    rows_GR: np.ndarray | None
    shared_lens: list[int]  # of each group, also if the groups are not used


@dataclass(slots=True)
class AttentionSplit:
    """How the attention of one decode step is divided, as arrays for a `kernels.paged.PagedBatch`."""

    shared_lens_B: np.ndarray  # int64, leading positions that a row shares with its group, 0 without a group
    prefix_groups_GR: np.ndarray | None  # int64, batch rows of each group, padded with -1
    split_lens: np.ndarray  # (2,) int64: length of a split of a row's own positions, of a group's shared positions
    splits: tuple[int, int]  # most splits of a row, of a group; powers of two, because a CUDA graph has fixed ones
    groups: PrefixGroups


def prefix_groups(
    sequences: list[Sequence],
    block_size: int,
    *,
    group_size: int,
    max_groups: int,
    lengths_B: np.ndarray,
    fixed_order: bool,
    has_windows: bool,
) -> PrefixGroups:
    """Find the shared-prefix groups of a batch: at most `max_groups` groups, of at most `group_size` rows each.

    `lengths_B` is the number of positions of each row. With `fixed_order`, shared positions end where a span of
    `kernels.fixed_order` ends. `has_windows` says that blocks before a sliding window may have been freed.
    """
    shareable = partial(_floor_to_split if fixed_order else _floor_to_block, block_size)
    shared_lens_B = np.zeros(len(sequences), dtype=np.int64)
    rows_GR = np.full((max_groups, group_size), -1, dtype=np.int64)
    shared_lens: list[int] = []
    n_saved = 0
    for rows in _group_rows_by_prompt(sequences, shareable, block_size) if max_groups else ():
        if has_windows:  # the first row's blocks serve the group; the shortest row has all blocks that others see
            rows.sort(key=lambda row: lengths_B[row])
        n_shared = shareable(sequences[rows[0]].n_prompt)
        for start in range(0, len(rows), group_size):
            group = rows[start : start + group_size]
            if len(group) == 1 or len(shared_lens) == max_groups:
                break
            rows_GR[len(shared_lens), : len(group)] = group
            shared_lens_B[group] = n_shared
            shared_lens.append(n_shared)
            n_saved += (len(group) - 1) * n_shared
    if n_saved > MIN_SAVING * len(sequences):
        return PrefixGroups(shared_lens_B, rows_GR, shared_lens)
    return PrefixGroups(np.zeros_like(shared_lens_B), None, shared_lens)


def split_attention(
    sequences: list[Sequence],
    block_size: int,
    *,
    group_size: int,
    max_groups: int,
    n_heads: int,
    n_multiprocessors: int,
    fixed_order: bool = False,
    has_windows: bool = False,
    lengths_B: np.ndarray,
    groups: PrefixGroups | None = None,
) -> AttentionSplit:
    """Divide the attention of a decode step into splits, which the kernel computes in parallel.

    The kernel computes every split once for each of `n_heads` key heads. With `fixed_order`, splits begin at the fixed
    positions of `kernels.fixed_order`, and `split_lens[1]` is the length of only the first split of a group.
    If `groups` is None, `prefix_groups` is called.
    """
    if groups is None:
        groups = prefix_groups(
            sequences,
            block_size,
            group_size=group_size,
            max_groups=max_groups,
            lengths_B=lengths_B,
            fixed_order=fixed_order,
            has_windows=has_windows,
        )
    shared_lens_B, prefix_groups_GR, shared_lens = groups.shared_lens_B, groups.rows_GR, groups.shared_lens
    uses_groups = prefix_groups_GR is not None
    longest_shared = max(shared_lens) if uses_groups else 0
    own_lens_B = lengths_B - shared_lens_B
    per_split = n_heads / (_SPLITS_PER_MULTIPROCESSOR * n_multiprocessors)
    if fixed_order:
        first_split_len = max(SPAN, int(sum(shared_lens) * per_split) // SPAN * SPAN)
        # Of a row that shares none, the positions up to SPAN are one part.
        n_first_spans_B = np.where(shared_lens_B > 0, n_spans(shared_lens_B), n_spans(np.minimum(lengths_B, SPAN)) - 1)
        own_splits = int((n_spans(lengths_B) - n_first_spans_B).max())
        shared_splits = (
            1 + n_spans(longest_shared) - n_spans(min(first_split_len, longest_shared)) if uses_groups else 0
        )
        splits = _next_power_of_two(own_splits), _next_power_of_two(shared_splits)
        split_lens = np.array([SPAN, first_split_len], dtype=np.int64)
        return AttentionSplit(shared_lens_B, prefix_groups_GR, split_lens, splits, groups)
    own_split_len, own_splits = _split_len_and_count(
        int(own_lens_B.max()), own_lens_B.sum() * per_split, _MAX_OWN_SPLIT_LEN
    )
    shared_split_len, shared_splits = _MAX_SHARED_SPLIT_LEN, 0
    if uses_groups:
        wanted = sum(shared_lens) * per_split
        wanted = max(wanted, min(2 * wanted, _SHORT_SHARED_SPLIT_LEN))
        shared_split_len, shared_splits = _split_len_and_count(longest_shared, wanted, _MAX_SHARED_SPLIT_LEN)
    split_lens = np.array([own_split_len, shared_split_len], dtype=np.int64)
    return AttentionSplit(shared_lens_B, prefix_groups_GR, split_lens, (own_splits, shared_splits), groups)


def _group_rows_by_prompt(
    sequences: list[Sequence], shareable: Callable[[int], int], block_size: int
) -> Iterable[list[int]]:
    """Return lists of rows that have the same KV blocks for their prompts. A list may have a single row.

    `shareable` maps the length of a prompt to the number of its positions that can be shared. Rows for which this is
    less than a block are left out.
    """
    rows: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        block_tables, n_blocks = sequence.block_tables, shareable(sequence.n_prompt) // block_size
        if n_blocks > block_tables.n_skipped[0]:  # a block that was released may be anybody's
            # A block belongs to one prefix, so two prompts that share their last full block share all before it.
            rows.setdefault(block_tables.group_blocks[0][n_blocks - 1], []).append(row)
    return rows.values()


def _split_len_and_count(longest: int, wanted: float, max_split_len: int) -> tuple[int, int]:
    """Return the length of a split, and the number of splits that cover `longest` positions.

    Both are powers of two, but the number is 0 for no positions. The length is at least `_MIN_SPLIT_LEN`. It exceeds
    `wanted` or `max_split_len` only if there would be more than `_MAX_SPLITS` splits otherwise.
    """
    split_len = _MIN_SPLIT_LEN
    while (2 * split_len <= wanted and split_len < max_split_len) or split_len * _MAX_SPLITS < longest:
        split_len *= 2
    return split_len, _next_power_of_two(-(-longest // split_len))


def _next_power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least else 0


def _floor_to_block(block_size: int, length: int) -> int:
    return length // block_size * block_size


def _floor_to_split(block_size: int, length: int) -> int:
    """Return the largest position up to `length` at which both a KV block and a fixed-order span begin."""
    last = n_spans(length + 1) - 1
    return next(start for span in range(last, -1, -1) if (start := span_start(span)) % block_size == 0)
