"""The split of a decode step's attention: who reads which positions together, and that every position is read once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from areno.engine.decoder.attention_split import split_attention
from areno.engine.decoder.block_manager import BlockManager, BlockTables
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import SlotTable
from areno.kernels.fixed_order import SPAN, span_start
from areno.kernels.paged import max_group_rows
from areno.types import GenerationRequest

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
        sequence.enter_batch(SlotTable(1), 0)
        sequence.n_kv = n_prompt + own
        n_own = -(-sequence.n_kv // SIZE) - n_shared
        sequence.block_tables = BlockTables(BlockManager(1, SIZE))
        sequence.block_tables.group_blocks[0] = [
            *range(first_block, first_block + n_shared),
            *range(own_block, own_block + n_own),
        ]
        own_block += n_own
        made.append(sequence)
    return made


def split(sequences: list[Sequence], max_groups: int = 64, n_multiprocessors: int = 10, fixed_order: bool = False):
    return split_attention(
        sequences,
        SIZE,
        group_size=8,
        max_groups=max_groups,
        n_heads=2,
        n_multiprocessors=n_multiprocessors,
        fixed_order=fixed_order,
        lengths_B=np.array([sequence.n_kv for sequence in sequences]),
    )


def test_in_fixed_order_a_group_has_at_most_16_queries_of_a_key_head_but_two_rows() -> None:
    assert [max_group_rows(heads, fixed_order=True) for heads in (1, 2, 4, 7, 8, 16)] == [8, 8, 4, 2, 2, 2]
    assert [max_group_rows(heads, fixed_order=False) for heads in (1, 8)] == [8, 8]


def test_groups_are_the_rows_with_the_same_prompt_blocks() -> None:
    group, other, single = (samples(42, [5] * 11, 0, 100), samples(41, [9, 3], 20, 500), samples(80, [1], 40, 600))
    rows = group + other + single
    random.Random(0).shuffle(rows)
    made = split(rows)
    assert made.prefix_groups_GR is not None
    assert made.prefix_groups_GR.shape == (64, 8)
    groups = [[row for row in members if row >= 0] for members in made.prefix_groups_GR.tolist()]
    assert sorted(len(members) for members in groups if members) == [2, 3, 8]
    assert all(row < 0 for members in made.prefix_groups_GR.tolist() for row in members[sum(r >= 0 for r in members) :])
    for members in groups:
        assert len({rows[row].request.request_id for row in members}) <= 1
        assert all(made.shared_lens_B[row] == 40 for row in members)
    grouped = {row for members in groups for row in members}
    assert [row for row in range(len(rows)) if row not in grouped] == [rows.index(single[0])]
    assert made.shared_lens_B[rows.index(single[0])] == 0


def test_a_row_left_over_reads_for_itself_as_do_rows_beyond_the_room_for_groups() -> None:
    nine = split(samples(40, [1] * 9, 0, 100))
    assert nine.shared_lens_B.tolist() == [40] * 8 + [0]
    two_groups = samples(40, [1] * 5, 0, 100) + samples(400, [1] * 3, 50, 300)
    made = split(two_groups, max_groups=1)
    assert made.shared_lens_B.tolist() == [40] * 5 + [0] * 3
    none = split(two_groups, max_groups=0)
    assert none.prefix_groups_GR is None
    assert none.splits[1] == 0


def test_no_groups_where_next_to_nothing_is_shared() -> None:
    long_own = samples(4, [900] * 4, 0, 100)
    made = split(long_own)
    assert made.prefix_groups_GR is None
    assert made.shared_lens_B.tolist() == [0] * 4


@pytest.mark.parametrize("n_multiprocessors", [1, 132])
@pytest.mark.parametrize("n_rows", [1, 9, 200])
@pytest.mark.parametrize("longest", [1, 63, 64, 65, 3000, 40_000])
def test_splits_reach_the_longest_row_and_no_more_than_needed(
    n_multiprocessors: int, n_rows: int, longest: int
) -> None:
    rng = random.Random(longest)
    rows = samples(32, [longest, *(rng.randint(1, longest) for _ in range(n_rows - 1))], 0, 100)
    made = split(rows, n_multiprocessors=n_multiprocessors)
    own = np.array([row.n_kv for row in rows]) - made.shared_lens_B
    for span, splits, most in zip(
        made.split_lens.tolist(), made.splits, (own.max(), made.shared_lens_B.max()), strict=True
    ):
        assert span >= 64
        assert span & (span - 1) == splits & (splits - 1) == 0
        assert splits * span >= most
        assert splits <= 16
        assert splits <= 1 or (splits // 2) * span < most


@pytest.mark.parametrize(("n_groups", "span"), [(3, 64), (6, 128), (12, 256), (24, 256), (40, 512)])
def test_short_shared_spans_are_twice_as_long(n_groups: int, span: int) -> None:
    """Two key heads make 20 pieces, two for each processor, where a span is a tenth of the shared positions."""
    rows = [each for group in range(n_groups) for each in samples(128, [1] * 8, group * 9, 1000 + group * 20)]
    assert split(rows).split_lens[1] == span


@pytest.mark.parametrize("n_multiprocessors", [1, 132])
@pytest.mark.parametrize("n_prompt", [40, 64, 200, 300, 2000, 5000])
def test_spans_have_room_for_their_parts(n_multiprocessors: int, n_prompt: int) -> None:
    groups = [samples(n_prompt, [1, 70, 900], 0, 9000), samples(n_prompt // 2, [1, 3], 5000, 20_000)]
    rows = [*groups[0], *groups[1], *samples(33, [1500], 8000, 30_000)]
    made = split(rows, n_multiprocessors=n_multiprocessors, fixed_order=True)
    shares = {position for span in range(99) if (position := span_start(span)) % SIZE == 0}
    first_split_len = int(made.split_lens[1])
    assert first_split_len in shares
    for row, shared in zip(rows, made.shared_lens_B.tolist(), strict=True):
        expected = max(position for position in shares if position <= row.n_prompt)
        assert shared in ({expected} if row in groups[0] and n_prompt >= 64 else {0, expected})
        led = min(shared, first_split_len) if shared else min(row.n_kv, SPAN)
        of_group, own = (
            [x for x in map(span_start, range(99)) if low <= x < high]
            for low, high in ((led, shared), (max(led, shared), row.n_kv))
        )
        assert len(of_group) + (shared > 0) <= made.splits[1]
        assert len(own) + (shared == 0) <= made.splits[0]
    assert all(n & (n - 1) == 0 for n in made.splits)
