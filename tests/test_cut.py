"""The cut of a decode step's attention: who reads which positions together, and that every position is read once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from areno.engine.decoder.cut import cut_attention
from areno.engine.decoder.sequence import Sequence
from areno.engine.types import GenerationRequest

SIZE = 4


def samples(n_prompt: int, own_lens: list[int], first_block: int, own_block: int) -> list[Sequence]:
    """Sequences that share the full blocks of a prompt, numbered from `first_block`, and hold own ones after them."""
    n_shared = n_prompt // SIZE
    made = []
    for i, own in enumerate(own_lens):
        sequence = Sequence(
            request=GenerationRequest(request_id=first_block, prompt=[1] * n_prompt),
            sample=i,
            key=0,
            max_new=999,
            stop_ids=frozenset(),
            tokens=[],
        )
        sequence.n_kv = n_prompt + own
        n_own = -(-sequence.n_kv // SIZE) - n_shared
        sequence.blocks = [*range(first_block, first_block + n_shared), *range(own_block, own_block + n_own)]
        own_block += n_own
        made.append(sequence)
    return made


def cut(sequences: list[Sequence], max_teams: int = 64, n_processors: int = 10):
    return cut_attention(sequences, SIZE, team_size=8, max_teams=max_teams, n_heads=2, n_processors=n_processors)


def test_teams_are_the_rows_with_the_same_prompt_blocks() -> None:
    group, other, single = (samples(42, [5] * 11, 0, 100), samples(41, [9, 3], 20, 500), samples(80, [1], 40, 600))
    rows = group + other + single
    random.Random(0).shuffle(rows)
    made = cut(rows)
    assert made.teams_MR is not None
    assert made.teams_MR.shape == (64, 8)
    teams = [[row for row in team if row >= 0] for team in made.teams_MR.tolist()]
    assert sorted(len(team) for team in teams if team) == [2, 3, 8]
    assert all(row < 0 for team in made.teams_MR.tolist() for row in team[sum(r >= 0 for r in team) :])
    for team in teams:
        assert len({rows[row].request.request_id for row in team}) <= 1
        assert all(made.shared_B[row] == 40 for row in team)
    members = {row for team in teams for row in team}
    assert [row for row in range(len(rows)) if row not in members] == [rows.index(single[0])]
    assert made.shared_B[rows.index(single[0])] == 0


def test_a_row_left_over_reads_for_itself_as_do_rows_beyond_the_places_for_teams() -> None:
    nine = cut(samples(40, [1] * 9, 0, 100))
    assert nine.shared_B.tolist() == [40] * 8 + [0]
    two_groups = samples(40, [1] * 5, 0, 100) + samples(400, [1] * 3, 50, 300)
    made = cut(two_groups, max_teams=1)
    assert made.shared_B.tolist() == [40] * 5 + [0] * 3
    none = cut(two_groups, max_teams=0)
    assert none.teams_MR is None
    assert none.splits[1] == 0


def test_no_teams_where_next_to_nothing_is_shared() -> None:
    long_own = samples(4, [900] * 4, 0, 100)
    made = cut(long_own)
    assert made.teams_MR is None
    assert made.shared_B.tolist() == [0] * 4


@pytest.mark.parametrize("n_processors", [1, 132])
@pytest.mark.parametrize("n_rows", [1, 9, 200])
@pytest.mark.parametrize("longest", [1, 63, 64, 65, 3000, 40_000])
def test_splits_reach_the_longest_row_and_no_more_than_needed(n_processors: int, n_rows: int, longest: int) -> None:
    rng = random.Random(longest)
    rows = samples(32, [longest, *(rng.randint(1, longest) for _ in range(n_rows - 1))], 0, 100)
    made = cut(rows, n_processors=n_processors)
    own = np.array([row.n_kv for row in rows]) - made.shared_B
    for span, splits, most in zip(made.spans.tolist(), made.splits, (own.max(), made.shared_B.max()), strict=True):
        assert span >= 64
        assert span & (span - 1) == splits & (splits - 1) == 0
        assert splits * span >= most
        assert splits <= 16
        assert splits <= 1 or (splits // 2) * span < most
