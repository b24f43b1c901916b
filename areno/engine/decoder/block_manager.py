"""Allocation of KV blocks: their layout over layers, the prefix cache, and the block tables of a sequence.

Attention layers with the same sliding window form a group. In a group with full attention, a sequence keeps the blocks
of all its tokens. In a group with a window, it keeps only the blocks of the window. All groups take blocks from one
pool, so no memory is reserved for a group that does not need it.

A block holds the keys and values of `block_size` tokens for `layers_per_block` layers. A group with more layers has
several block tables, and needs one block per table for the same `block_size` tokens. These blocks are allocated
together. They are called a group block and identified by the index of the first block.

A group block is in use (sequences refer to it), cached (only the prefix cache refers to it) or free. Cached group
blocks are evicted when blocks run out, the least recently used first.

The prefix cache gives an id to every cached prefix, which is a whole number of blocks long. In the first group, it
looks up a full group block by (id of the prefix before the block, token ids in the block). The lookup compares token
ids, not only hashes, so a match is exact. In the other groups, it looks up a group block by the id of the prefix that
ends with the block.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from areno.cost.kv_layout import KVGroup, n_tables_with_windows

EMPTY_PREFIX = 0  # id of the prefix before the first block


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix of a prompt. Its blocks may be evicted until `BlockManager.acquire` is called for them."""

    n_group_blocks: int
    prefix_id: int
    group_blocks: list[list[int]]  # for each group of layers, `n_group_blocks` of them
    n_skipped: list[int]  # for each group, the leading entries before the window, which hold the scratch block

    def cached_blocks(self) -> list[int]:
        """Return the cached group blocks of all groups of layers. Scratch blocks are left out."""
        return [
            group_block for each, n in zip(self.group_blocks, self.n_skipped, strict=True) for group_block in each[n:]
        ]


class BlockManager:
    """Allocates KV blocks, shares them between sequences, and finds cached prefixes."""

    def __init__(self, n_blocks: int, block_size: int, groups: Sequence[KVGroup] = (KVGroup(None),)):
        self.n_blocks, self.block_size, self.groups = n_blocks, block_size, tuple(groups)
        self.scratch = n_blocks  # stands where a sequence has no group block
        self.blocks_over_all_groups = sum(group.n_tables for group in groups)  # blocks of a group block of every group
        self.blocks_over_window_groups = n_tables_with_windows(groups)  # of those with windows alone
        self.has_windows = self.blocks_over_window_groups > 0
        self.n_available = n_blocks  # blocks that are free, and those that can be evicted
        self.free_blocks = deque(range(n_blocks))
        self._ref_counts = [0] * n_blocks
        self._physical_blocks: list[tuple[int, ...]] = [(block,) for block in range(n_blocks)]  # by the first block
        self.cached_group_blocks: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_content: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # content -> (prefix id, group block)
        self._by_prefix: list[dict[int, int]] = [
            {} for _ in groups
        ]  # prefix id -> group block; of the first group unused
        self._content: dict[int, tuple[dict[Any, Any], Any]] = {}  # registered group block -> where, and its key there
        self._last_prefix_id = EMPTY_PREFIX

    def n_blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def physical_blocks(self, first: int) -> tuple[int, ...]:
        """Return the blocks of a group block in use, one for each block table of its group."""
        return self._physical_blocks[first]

    def match_prefix(self, tokens: list[int], max_group_blocks: int) -> PrefixMatch:
        """Return the longest prefix of a prompt, up to `max_group_blocks`, that is cached in every group of layers.

        In a group with a sliding window, only the blocks that the first token after the prefix attends to must be
        cached.
        """
        group_blocks: list[int] = []
        prefix_ids = [EMPTY_PREFIX]
        for start in range(0, max_group_blocks * self.block_size, self.block_size):
            found = self._by_content.get((prefix_ids[-1], tuple(tokens[start : start + self.block_size])))
            if found is None:
                break
            prefix_ids.append(found[0])
            group_blocks.append(found[1])
        if not self.has_windows:
            return PrefixMatch(len(group_blocks), prefix_ids[-1], [group_blocks], [0])
        of_groups = [
            group_blocks,
            *([each.get(i, self.scratch) for i in prefix_ids[1:]] for each in self._by_prefix[1:]),
        ]
        n_group_blocks = self._longest_prefix_len(of_groups)
        n_skipped = [
            group.first_visible_block(n_group_blocks * self.block_size, self.block_size) for group in self.groups
        ]
        for each, n in zip(of_groups, n_skipped, strict=True):
            each[n_group_blocks:], each[:n] = [], [self.scratch] * n
        return PrefixMatch(n_group_blocks, prefix_ids[n_group_blocks], of_groups, n_skipped)

    def _longest_prefix_len(self, of_groups: list[list[int]]) -> int:
        """Return the length in blocks of the longest prefix that is usable in every group of layers.

        `of_groups` has a list for each group of layers: the prompt's cached group blocks in order, with the scratch
        block where none is cached.
        """
        longest, runs = 0, [0] * len(of_groups)  # the last ones that are there, one after the other
        for n, group_blocks in enumerate(zip(*of_groups, strict=True), start=1):
            runs = [
                0 if group_block == self.scratch else run + 1
                for run, group_block in zip(runs, group_blocks, strict=True)
            ]
            seen = [n - group.first_visible_block(n * self.block_size, self.block_size) for group in self.groups]
            if all(run >= n_seen for run, n_seen in zip(runs, seen, strict=True)):
                longest = n
        return longest

    def can_allocate(self, shared: Iterable[int], n_new: int, reserve: int = 0) -> bool:
        """Return whether `reserve` blocks are left after acquiring `shared` and allocating `n_new` blocks."""
        revived = sum(
            len(self._physical_blocks[group_block]) for group_block in shared if group_block in self.cached_group_blocks
        )
        return self.n_available - revived - n_new >= reserve

    def acquire(self, group_blocks: Iterable[int], times: int = 1) -> None:
        """Add `times` references to each group block, in use or cached, so that it is not evicted."""
        for group_block in group_blocks:
            if self._ref_counts[group_block] == 0:
                del self.cached_group_blocks[group_block]
                self.n_available -= len(self._physical_blocks[group_block])
            self._ref_counts[group_block] += times

    def allocate(self, n: int = 1, group: int = 0) -> list[int]:
        """Allocate `n` group blocks, each with one reference, for the layers of `group`. Return the index of each.

        Cached group blocks are evicted if necessary. The caller has checked that `n_available` suffices.
        """
        n_tables = self.groups[group].n_tables
        free, physical, counts = self.free_blocks, self._physical_blocks, self._ref_counts
        while len(free) < n * n_tables:
            evicted, _ = self.cached_group_blocks.popitem(last=False)
            where, key = self._content.pop(evicted)
            del where[key]
            free.extend(physical[evicted])
        self.n_available -= n * n_tables
        taken = [free.popleft() for _ in range(n * n_tables)]
        found = taken[::n_tables]
        for blocks in zip(*(taken[table::n_tables] for table in range(n_tables)), strict=True):
            physical[blocks[0]] = blocks
            counts[blocks[0]] = 1
        return found

    def release(self, group_blocks: list[int]) -> None:
        """Remove one reference from each group block. They must be in the order of their positions in the sequence."""
        counts, content, physical, free = self._ref_counts, self._content, self._physical_blocks, self.free_blocks
        # A later one is useful only together with the earlier ones, so it must be evicted before them.
        for group_block in reversed(group_blocks):
            counts[group_block] -= 1
            if counts[group_block] == 0:
                self.n_available += len(physical[group_block])
                if group_block in content:
                    self.cached_group_blocks[group_block] = None
                else:
                    free.extend(physical[group_block])

    def register(self, group_block: int, before: int, tokens: tuple[int, ...]) -> int:
        """Return the id of the prefix that extends the prefix with id `before` by `tokens`.

        A new prefix is added to the cache, with `group_block` as its last block in the first group of layers.
        """
        key = (before, tokens)
        found = self._by_content.get(key)
        if found is not None:
            return found[0]
        self._last_prefix_id += 1
        self._by_content[key] = (self._last_prefix_id, group_block)
        self._content[group_block] = self._by_content, key
        return self._last_prefix_id

    def register_last_block(self, group_block: int, group: int, prefix_id: int) -> None:
        """Add `group_block` to the prefix cache, as the last block of a prefix in a group other than the first."""
        if prefix_id not in self._by_prefix[group]:
            self._by_prefix[group][prefix_id] = group_block
            self._content[group_block] = self._by_prefix[group], prefix_id

    def reset(self) -> None:
        """Empty the prefix cache, and free the blocks that no sequence uses. All prefix ids become invalid."""
        for found in (self._by_content, *self._by_prefix, self._content):
            found.clear()
        for group_block in self.cached_group_blocks:
            self.free_blocks.extend(self._physical_blocks[group_block])
        self.cached_group_blocks.clear()


class BlockTables:
    """The KV blocks of one sequence, from its admission to the batch until it finishes or is preempted.

    `group_blocks` has, for each group of layers, one group block for every `block_size` positions. The first
    `n_skipped` of them lie before the window and have been freed. All groups have blocks for the first `capacity`
    positions.
    """

    __slots__ = ("_blocks", "capacity", "group_blocks", "n_registered", "n_skipped", "n_uploaded", "prefix_id")

    def __init__(self, blocks: BlockManager, group_blocks: list[list[int]] | None = None):
        self._blocks = blocks
        self.group_blocks: list[list[int]] = group_blocks or [[] for _ in blocks.groups]
        self.n_skipped = [0] * len(self.group_blocks)
        self.capacity = 0
        self.n_uploaded = 0  # how many group blocks of each group are in the device's tables
        self.n_registered = 0  # how many of them can be found by content
        self.prefix_id = EMPTY_PREFIX  # of the prefix that ends with the last registered group block

    def allocate_prompt(self, match: PrefixMatch, n_tokens: int) -> int:
        """Acquire the cached prefix, allocate blocks for the rest of a prompt, and return the number of new blocks.

        After a preemption, `n_tokens` includes the completion so far. For layers with a window, `allocate_until`
        allocates the new blocks later, before each prefill chunk.
        """
        blocks, n_taken = self._blocks, 0
        blocks.acquire(match.cached_blocks())
        self.group_blocks, self.n_skipped = match.group_blocks, match.n_skipped
        self.n_registered, self.prefix_id = match.n_group_blocks, match.prefix_id
        for group, group_blocks in enumerate(self.group_blocks):
            if blocks.groups[group].window is None:
                n_new = blocks.n_blocks_for(n_tokens) - len(group_blocks)
                group_blocks += blocks.allocate(n_new, group)
                n_taken += n_new * blocks.groups[group].n_tables
        self._update_capacity()
        return n_taken

    @staticmethod
    def for_followers(blocks: BlockManager, n: int, *, has_partial_block: bool) -> list[BlockTables]:
        """Return block tables for `n` sequences whose prompt is computed by another sequence, the leader.

        `share_prefix` later inserts the prompt's full blocks. With `has_partial_block`, the prompt's last block is
        partly filled, and each sequence gets a block of its own for it.
        """
        if not has_partial_block:
            return [BlockTables(blocks) for _ in range(n)]
        own = zip(*(blocks.allocate(n, group) for group in range(len(blocks.groups))), strict=True)
        return [BlockTables(blocks, [[group_block] for group_block in of_groups]) for of_groups in own]

    def share_prefix(self, followers: Sequence[BlockTables], n_shared: int) -> None:
        """In each group of layers, insert this prompt's first `n_shared` group blocks before those of `followers`."""
        for group, first in enumerate(self.n_skipped):
            shared = self.group_blocks[group][:n_shared]
            if shared and followers:
                self._blocks.acquire(shared[first:], len(followers))
                for each in followers:
                    each.group_blocks[group][:0] = shared
        for each in followers:
            each.n_skipped, each.capacity = list(self.n_skipped), self.capacity
            each.n_registered, each.prefix_id = self.n_registered, self.prefix_id

    def allocate_until(self, end: int) -> None:
        blocks = self._blocks
        for group, group_blocks in enumerate(self.group_blocks):
            group_blocks += blocks.allocate(max(0, blocks.n_blocks_for(end) - len(group_blocks)), group)
        self._update_capacity()

    @staticmethod
    def append_blocks(tables: Sequence[BlockTables]) -> None:
        """Allocate the KV blocks for the next `block_size` positions of each sequence, in all layers."""
        blocks = tables[0]._blocks
        for group in range(len(blocks.groups)):
            for each, group_block in zip(tables, blocks.allocate(len(tables), group), strict=True):
                each.group_blocks[group].append(group_block)
        for each in tables:
            each.capacity += blocks.block_size

    def release_skipped(self, position: int) -> None:
        """Release blocks that lie before the sliding window of `position` and are already in the prefix cache."""
        blocks = self._blocks
        for group, group_blocks in enumerate(self.group_blocks):
            behind = min(blocks.groups[group].first_visible_block(position, blocks.block_size), self.n_registered)
            if behind > self.n_skipped[group]:
                blocks.release(group_blocks[self.n_skipped[group] : behind])
                self.n_skipped[group] = behind

    def register(self, tokens: list[int], n_tokens: int) -> None:
        """Add the full KV blocks of the first `n_tokens` tokens to the prefix cache, except those already added."""
        blocks, size = self._blocks, self._blocks.block_size
        for i in range(self.n_registered, n_tokens // size):
            content = tuple(tokens[i * size : (i + 1) * size])
            self.prefix_id = blocks.register(self.group_blocks[0][i], self.prefix_id, content)
            for group in range(1, len(self.group_blocks)):
                blocks.register_last_block(self.group_blocks[group][i], group, self.prefix_id)
            self.n_registered = i + 1

    @staticmethod
    def take_new_entries(tables: Sequence[BlockTables], slots: Sequence[int]) -> np.ndarray:
        """Return the block table entries that are not on the device yet, and mark them as uploaded.

        `slots` are the sequences' rows in the tables on the device. Returns (4, n) int64: table, slot, column, block.
        """
        blocks, parts, n_before = tables[0]._blocks, [], 0
        for index, group in enumerate(blocks.groups):
            first_columns = [each.n_uploaded for each in tables]
            if group.window is not None:
                first_columns = [max(each.n_uploaded, each.n_skipped[index]) for each in tables]
            new = [each.group_blocks[index][first:] for each, first in zip(tables, first_columns, strict=True)]
            lengths = np.fromiter(map(len, new), np.int64, len(new))
            starts, group_blocks = np.cumsum(lengths) - lengths, list(chain.from_iterable(new))
            slots_N = np.repeat(np.asarray(slots, dtype=np.int64), lengths)
            columns_N = np.arange(len(group_blocks)) + np.repeat(first_columns - starts, lengths)
            physical = [group_blocks]
            if group_blocks and group.n_tables > 1:
                physical = list(zip(*map(blocks.physical_blocks, group_blocks), strict=True))
            for table, of_table in enumerate(physical, start=n_before):
                tables_N = np.full_like(slots_N, table)
                parts.append(np.stack([tables_N, slots_N, columns_N, np.array(of_table, dtype=np.int64)]))
            n_before += group.n_tables
        for each in tables:
            each.n_uploaded = len(each.group_blocks[0])
        return np.concatenate(parts, axis=1)

    @staticmethod
    def release(tables: Sequence[BlockTables]) -> None:
        """Release all KV blocks of sequences. Blocks of the first sequence will be evicted first."""
        held: list[int] = []
        for each in reversed(tables):  # BlockManager.release begins with the last block
            for group in reversed(range(len(each.group_blocks))):
                held += each.group_blocks[group][each.n_skipped[group] :]
        if held:
            tables[0]._blocks.release(held)

    def _update_capacity(self) -> None:
        self.capacity = min(map(len, self.group_blocks)) * self._blocks.block_size
