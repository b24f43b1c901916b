"""Block manager: sharing, content lookup, eviction, and no block lost under random use."""

from __future__ import annotations

import random

from areno.engine.decoder.block_manager import EMPTY_PREFIX, BlockManager, PrefixMatch


def fill(manager: BlockManager, tokens: list[int]) -> list[int]:
    """Acquire blocks for these tokens, sharing what is found and registering what is full."""
    size = manager.block_size
    match = manager.match_prefix(tokens, len(tokens) // size)
    found, prefix_id = match.cached_blocks(), match.prefix_id
    manager.acquire(found)
    blocks = found + manager.allocate(manager.n_blocks_for(len(tokens)) - len(found))
    for i in range(len(found), len(tokens) // size):
        prefix_id = manager.register(blocks[i], prefix_id, tuple(tokens[i * size : (i + 1) * size]))
    return blocks


def test_only_the_exact_prefix_is_found() -> None:
    manager = BlockManager(8, 2)
    blocks = fill(manager, [1, 2, 3, 4, 5])
    assert len(blocks) == 3
    assert manager.match_prefix([1, 2, 3, 4, 9, 9], 3).cached_blocks() == blocks[:2]
    assert manager.match_prefix([1, 2, 3, 4, 9, 9], 1).cached_blocks() == blocks[:1]
    # The same tokens after another prefix are other content.
    assert manager.match_prefix([3, 4], 1) == PrefixMatch(0, EMPTY_PREFIX, [[]], [0])
    assert manager.match_prefix([1, 3, 3, 4], 2) == PrefixMatch(0, EMPTY_PREFIX, [[]], [0])


def test_released_blocks_are_found_until_evicted_oldest_and_last_of_the_prefix_first() -> None:
    manager = BlockManager(4, 1)
    old = fill(manager, [1, 2])
    manager.release(old)
    young = fill(manager, [7, 8])
    manager.release(young)
    assert (manager.n_available, len(manager.cached_group_blocks)) == (4, 4)
    assert manager.allocate()[0] == old[1]
    assert manager.match_prefix([1, 2], 2).cached_blocks() == old[:1]
    assert manager.allocate()[0] == old[0]
    assert manager.match_prefix([1, 2], 2).cached_blocks() == []
    assert manager.match_prefix([7, 8], 2).cached_blocks() == young


def test_use_makes_a_block_young_again() -> None:
    manager = BlockManager(2, 1)
    first = fill(manager, [1])
    second = fill(manager, [2])
    manager.release(first)
    manager.release(second)
    manager.acquire(first)
    manager.release(first)
    assert manager.allocate()[0] == second[0]


def test_a_shared_block_stays_while_a_sequence_uses_it() -> None:
    manager = BlockManager(2, 1)
    blocks = fill(manager, [5])
    assert fill(manager, [5]) == blocks
    manager.release(blocks)
    assert manager.n_available == 1
    manager.release(blocks)
    assert manager.n_available == 2


def test_can_allocate_counts_cached_blocks_that_would_be_acquired() -> None:
    manager = BlockManager(3, 1)
    blocks = fill(manager, [1, 2])
    manager.release(blocks)
    assert manager.can_allocate(blocks, 1)
    assert not manager.can_allocate(blocks, 2)
    assert not manager.can_allocate(blocks, 1, reserve=1)
    assert manager.can_allocate([], 3)


def test_equal_content_in_two_blocks_is_registered_once() -> None:
    manager = BlockManager(4, 1)
    first, second = manager.allocate(2)
    prefix_id = manager.register(first, EMPTY_PREFIX, (1,))
    assert manager.register(second, EMPTY_PREFIX, (1,)) == prefix_id
    manager.release([first, second])
    assert len(manager.cached_group_blocks) == 1
    assert manager.match_prefix([1], 1).cached_blocks() == [first]


def test_reset_leaves_nothing_to_find_and_loses_no_block() -> None:
    manager = BlockManager(4, 1)
    held, released = fill(manager, [1, 2]), fill(manager, [3])
    manager.release(released)
    manager.reset()
    assert manager.match_prefix([1, 2], 2).cached_blocks() == manager.match_prefix([3], 1).cached_blocks() == []
    assert (manager.n_available, len(manager.cached_group_blocks)) == (2, 0)
    manager.release(held)
    assert (manager.n_available, len(manager.cached_group_blocks)) == (4, 0)


def test_random_use_keeps_content_apart_and_loses_no_block() -> None:
    rng = random.Random(0)
    manager = BlockManager(24, 2)
    content: dict[int, tuple[int, ...]] = {}  # block -> the whole prefix that was written into it
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(3000):
        roll = rng.random()
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        if roll < 0.02:
            manager.reset()
        elif roll < 0.55 and manager.n_available >= manager.n_blocks_for(len(tokens)):
            n_found = len(manager.match_prefix(tokens, len(tokens) // 2).cached_blocks())
            blocks = fill(manager, tokens)
            for i, block in enumerate(blocks):
                prefix = tuple(tokens[: 2 * i + 2])
                if i < n_found:
                    assert content[block] == prefix  # what is found holds what was asked for
                content[block] = prefix
            live.append((blocks, tokens))
        elif live:
            manager.release(live.pop(rng.randrange(len(live)))[0])
        for blocks, held_tokens in live:
            assert all(content[block] == tuple(held_tokens[: 2 * i + 2]) for i, block in enumerate(blocks))
        assert manager.n_available + len({block for blocks, _ in live for block in blocks}) == 24
    for blocks, _ in live:
        manager.release(blocks)
    assert manager.n_available == 24
