"""Which rows of a decode step read the blocks of their common prompt together. No tensors."""

from __future__ import annotations

import numpy as np

from areno.engine.decoder.sequence import Sequence

_WORTH_IT = 16  # positions that must be saved for each row of the batch, on average


def form_teams(
    sequences: list[Sequence], block_size: int, team_size: int, max_teams: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Teams of at most `team_size` rows that hold the same blocks for the full blocks of their prompts.

    Returns, for each row, how many positions its team reads for it (0 without a team), and the teams: (max_teams,
    team_size) rows, filled up with -1; None where teams would save next to nothing. Both int64.
    """
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        n_blocks = sequence.n_prompt // block_size
        if n_blocks:
            # A block is held at one depth of one prefix, so the last of two prompts stands for those before it.
            groups.setdefault(sequence.blocks[n_blocks - 1], []).append(row)
    shared_B = np.zeros(len(sequences), dtype=np.int64)
    teams_MR = np.full((max_teams, team_size), -1, dtype=np.int64)
    n_teams = n_saved = 0
    for rows in groups.values():
        n_shared = sequences[rows[0]].n_prompt // block_size * block_size
        for start in range(0, len(rows), team_size):
            team = rows[start : start + team_size]
            if len(team) == 1 or n_teams == max_teams:
                break
            teams_MR[n_teams, : len(team)] = team
            shared_B[team] = n_shared
            n_teams += 1
            n_saved += (len(team) - 1) * n_shared
    if n_saved < _WORTH_IT * len(sequences):
        return np.zeros_like(shared_B), None
    return shared_B, teams_MR
