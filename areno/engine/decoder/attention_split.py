"""The division of a decode step's attention into pieces that run in parallel. Contains no tensors.

Rows whose prompts lie in the same KV blocks form a shared-prefix group, and the kernel reads these blocks once for
the whole group. Then the shared positions of a group, and the remaining positions of each row, are cut into spans.
The length of a span is chosen so that all multiprocessors are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from areno.engine.decoder.sequence import Sequence
from areno.kernels.fixed_order import SPAN, border, n_spans

_MIN_SAVING = 16  # positions per row of the batch that groups must save on average to be used
_MIN_SPAN, _MAX_SPLITS = 64, 16
_MAX_OWN_SPAN, _MAX_SHARED_SPAN = 256, 512  # rows' own lengths differ, and short spans balance them better
_PIECES_PER_PROCESSOR = 2  # pieces of own positions, and as many of shared positions
# Up to this length a shared span is twice as long as _PIECES_PER_PROCESSOR demands, because every row has to merge the
# results of its pieces. On an H200, 256 shared positions of 32 groups take 55.0 us instead of 58.6 (8 key heads), 31.8
# instead of 33.8 (4 key heads).
_SHORT_SHARED_SPAN = 256


@dataclass(slots=True)
class AttentionSplit:
    """The division of one decode step's attention, as numpy arrays for a `kernels.paged.PagedBatch`.

    Attributes:
        shared_lens_B: int64, number of first positions that each row shares with its group. 0 for a row without a
            group.
        prefix_groups_GR: int64, row indices of each group, filled up with -1. None if there are no groups.
        spans: (2,) int64, length of a span of a row's own positions, and of a group's shared positions.
        splits: Largest number of spans of a row, and of a group. A CUDA graph is captured for fixed `splits` and a
            fixed shape of prefix_groups_GR, so both numbers are rounded up to powers of two.
    """

    shared_lens_B: np.ndarray
    prefix_groups_GR: np.ndarray | None
    spans: np.ndarray
    splits: tuple[int, int]


def split_attention(
    sequences: list[Sequence],
    block_size: int,
    *,
    group_size: int,
    max_groups: int,
    n_heads: int,
    n_processors: int,
    fixed_order: bool = False,
    has_windows: bool = False,
) -> AttentionSplit:
    """Divide the attention of a decode step into pieces.

    Args:
        sequences: The sequences, one for each row of the batch.
        block_size: Tokens in a KV block.
        group_size: Most rows in a shared-prefix group.
        max_groups: Most groups. 0 for no groups.
        n_heads: Number of key heads on this rank. Each head has its own pieces.
        n_processors: Number of multiprocessors of the device.
        fixed_order: Whether to use the spans of fixed-order attention (`kernels.fixed_order`). The first spans of a
            group may then be computed as one piece.
        has_windows: Whether some layers have sliding windows, so that sequences may have freed blocks.
    """
    shareable = partial(_whole_spans if fixed_order else _whole_blocks, block_size)
    shared_lens_B = np.zeros(len(sequences), dtype=np.int64)
    prefix_groups_GR = np.full((max_groups, group_size), -1, dtype=np.int64)
    shared_lens: list[int] = []
    n_saved = 0
    for rows in _rows_by_prompt(sequences, shareable, block_size):
        if has_windows:  # the first row's blocks serve the group; the shortest row has all blocks that others see
            rows.sort(key=lambda row: sequences[row].n_kv)
        n_shared = shareable(sequences[rows[0]].n_prompt)
        for start in range(0, len(rows), group_size):
            group = rows[start : start + group_size]
            if len(group) == 1 or len(shared_lens) == max_groups:
                break
            prefix_groups_GR[len(shared_lens), : len(group)] = group
            shared_lens_B[group] = n_shared
            shared_lens.append(n_shared)
            n_saved += (len(group) - 1) * n_shared
    uses_groups = n_saved > _MIN_SAVING * len(sequences)
    if not uses_groups:
        shared_lens_B[:] = 0
    longest_shared = max(shared_lens) if uses_groups else 0
    own_lens_B = np.array([sequence.n_kv for sequence in sequences], dtype=np.int64) - shared_lens_B
    per_piece = n_heads / (_PIECES_PER_PROCESSOR * n_processors)
    if fixed_order:
        lead = max(SPAN, int(sum(shared_lens) * per_piece) // SPAN * SPAN)
        lengths_B = own_lens_B + shared_lens_B
        # In a row without shared positions, the positions up to SPAN are one piece.
        led_B = np.where(shared_lens_B > 0, n_spans(shared_lens_B), n_spans(np.minimum(lengths_B, SPAN)) - 1)
        own_splits = int((n_spans(lengths_B) - led_B).max())
        shared_splits = 1 + n_spans(longest_shared) - n_spans(min(lead, longest_shared)) if uses_groups else 0
        splits = _power_of_two(own_splits), _power_of_two(shared_splits)
        spans = np.array([SPAN, lead], dtype=np.int64)
        return AttentionSplit(shared_lens_B, prefix_groups_GR if uses_groups else None, spans, splits)
    own_span, own_splits = _span_and_splits(int(own_lens_B.max()), own_lens_B.sum() * per_piece, _MAX_OWN_SPAN)
    shared_span, shared_splits = _MAX_SHARED_SPAN, 0
    if uses_groups:
        wanted = sum(shared_lens) * per_piece
        wanted = max(wanted, min(2 * wanted, _SHORT_SHARED_SPAN))
        shared_span, shared_splits = _span_and_splits(longest_shared, wanted, _MAX_SHARED_SPAN)
    spans = np.array([own_span, shared_span], dtype=np.int64)
    return AttentionSplit(shared_lens_B, prefix_groups_GR if uses_groups else None, spans, (own_splits, shared_splits))


def _rows_by_prompt(sequences: list[Sequence], shareable: Callable[[int], int], block_size: int) -> Iterable[list[int]]:
    """Return the groups of row indices whose prompts lie in the same KV blocks. A group may have one row.

    `shareable` maps the length of a prompt to the number of positions that can be shared.
    """
    rows: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        held, n_blocks = sequence.held, shareable(sequence.n_prompt) // block_size
        if n_blocks > held.n_behind[0]:  # a freed block may belong to another sequence
            # A block belongs to one prefix, so two prompts that share their last full block share all before it.
            rows.setdefault(held.stacks[0][n_blocks - 1], []).append(row)
    return rows.values()


def _span_and_splits(longest: int, wanted: float, max_span: int) -> tuple[int, int]:
    """Return the length of a span, near `wanted`, and the number of spans that cover `longest`.

    Both are powers of two. The span exceeds `max_span` only if more than `_MAX_SPLITS` spans would be needed
    otherwise.
    """
    span = _MIN_SPAN
    while (2 * span <= wanted and span < max_span) or span * _MAX_SPLITS < longest:
        span *= 2
    return span, _splits(longest, span)


def _splits(longest: int, span: int) -> int:
    """Return the number of spans that cover `longest` positions, rounded up to a power of two."""
    return _power_of_two(-(-longest // span))


def _power_of_two(least: int) -> int:
    """Return the least power of two that is at least `least`, and 0 for 0."""
    return 1 << (least - 1).bit_length() if least else 0


def _whole_blocks(block_size: int, length: int) -> int:
    """Return how many of the first `length` positions lie in full blocks."""
    return length // block_size * block_size


def _whole_spans(block_size: int, length: int) -> int:
    """Return the last border between spans that is at most `length` and also a border between blocks."""
    last = n_spans(length + 1) - 1
    return next(start for span in range(last, -1, -1) if (start := border(span)) % block_size == 0)
