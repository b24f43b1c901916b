"""How the attention of a decode step is cut into pieces that run side by side. No tensors.

Rows that hold the same blocks for their prompt form teams, for which these blocks are read once. What a team shares,
and what each row has of its own, is cut into spans of a length that gives all processors work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.engine.decoder.sequence import Sequence

_WORTH_IT = 16  # positions that teams must save for each row of the batch, on average
_LEAST_SPAN, _MAX_SPLITS = 64, 16
_LONGEST_OWN, _LONGEST_SHARED = 256, 512  # what rows have alone is uneven: short spans fit it
_PIECES = 2  # that a processor should get, of rows' own positions and of shared ones


@dataclass(slots=True)
class Cut:
    """As in `areno.kernels.paged.Batch`: shared_B, teams_MR, spans int64, and splits.

    The splits and the shape of teams_MR are part of a captured graph; so splits are powers of two, to be few.
    """

    shared_B: np.ndarray
    teams_MR: np.ndarray | None
    spans: np.ndarray
    splits: tuple[int, int]


def cut_attention(
    sequences: list[Sequence], block_size: int, *, team_size: int, max_teams: int, n_heads: int, n_processors: int
) -> Cut:
    """The cut for one new token of each sequence. n_heads: key heads, each a piece of its own."""
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        n_blocks = sequence.n_prompt // block_size
        if n_blocks:
            # A block is held at one depth of one prefix, so the last of two prompts stands for those before it.
            groups.setdefault(sequence.blocks[n_blocks - 1], []).append(row)
    shared_B = np.zeros(len(sequences), dtype=np.int64)
    teams_MR = np.full((max_teams, team_size), -1, dtype=np.int64)
    shared_lens: list[int] = []
    n_saved = 0
    for rows in groups.values():
        n_shared = sequences[rows[0]].n_prompt // block_size * block_size
        for start in range(0, len(rows), team_size):
            team = rows[start : start + team_size]
            if len(team) == 1 or len(shared_lens) == max_teams:
                break
            teams_MR[len(shared_lens), : len(team)] = team
            shared_B[team] = n_shared
            shared_lens.append(n_shared)
            n_saved += (len(team) - 1) * n_shared
    has_teams = n_saved > _WORTH_IT * len(sequences)
    if not has_teams:
        shared_B[:] = 0
    own_B = np.array([sequence.n_kv for sequence in sequences], dtype=np.int64) - shared_B
    per_piece = n_heads / (_PIECES * n_processors)
    own_span, own_splits = _span_and_splits(int(own_B.max()), own_B.sum() * per_piece, _LONGEST_OWN)
    shared_span, shared_splits = _LONGEST_SHARED, 0
    if has_teams:
        shared_span, shared_splits = _span_and_splits(max(shared_lens), sum(shared_lens) * per_piece, _LONGEST_SHARED)
    spans = np.array([own_span, shared_span], dtype=np.int64)
    return Cut(shared_B, teams_MR if has_teams else None, spans, (own_splits, shared_splits))


def _span_and_splits(longest: int, wanted: float, most: int) -> tuple[int, int]:
    """A power of two near the wanted span, up to `most`, and how many of them the longest takes, rounded up to one."""
    span = _LEAST_SPAN
    while (2 * span <= wanted and span < most) or span * _MAX_SPLITS < longest:
        span *= 2
    splits = 1
    while splits * span < longest:
        splits *= 2
    return span, splits
