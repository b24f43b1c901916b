"""Which blocks of the paged KV cache are in use, and which hold a prefix that another request can reuse. No tensors.

What is allocated is a stack: the blocks that a group of layers needs for `block_size` tokens of one sequence
(`kv/layout.py`). It goes by its first block, which is all of it where there is one group. A stack is in one of two
states, and blocks that are in none are free:

    in use    one or more sequences read or write it; its reference count says how many
    cached    no sequence uses it, but it can still be found by content until it is evicted (least recently used first)

A full stack of the first group is registered under (id of the prefix before it, its token ids). The id of a prefix
stands for all of its tokens. The dictionary compares token ids, not hashes alone, so a match is always exact. Stacks of
other groups, which see fewer tokens, are registered under the id of the prefix that ends with them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from areno.engine.decoder.kv.layout import KVGroup, tables_with_windows

EMPTY_PREFIX = 0  # id of the prefix before the first block


@dataclass(frozen=True, slots=True)
class Match:
    """A registered prefix of `n_stacks` stacks in each group. Of the first `n_behind`, the group has none.

    stacks: of each group, yet to be acquired; what lies behind the window of a group is the manager's `scratch`.
    """

    n_stacks: int
    prefix_id: int
    stacks: list[list[int]]
    n_behind: list[int]

    def found(self) -> list[int]:
        """All that is there to be acquired."""
        return [stack for each, n in zip(self.stacks, self.n_behind, strict=True) for stack in each[n:]]


class BlockManager:
    """Allocates, shares and finds stacks of the `n_blocks` blocks of `block_size` tokens each.

    groups: of layers, the one that sees farthest first.
    """

    def __init__(self, n_blocks: int, block_size: int, groups: Sequence[KVGroup] = (KVGroup(None),)):
        self.n_blocks, self.block_size, self.groups = n_blocks, block_size, tuple(groups)
        self.scratch = n_blocks  # stands where a sequence has no stack
        self.per_stack = sum(group.n_tables for group in groups)  # blocks of a stack of every group
        self.per_window_stack = tables_with_windows(groups)  # of those with windows alone
        self.has_windows = self.per_window_stack > 0
        self.n_available = n_blocks  # blocks that are free, and those that can be evicted
        self._free = deque(range(n_blocks))
        self._ref_counts = [0] * n_blocks
        self._stacks: list[tuple[int, ...]] = [(block,) for block in range(n_blocks)]  # by the first block
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_content: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # content -> (prefix id, stack)
        self._by_prefix: list[dict[int, int]] = [{} for _ in groups]  # prefix id -> stack; of the first group unused
        self._content: dict[int, tuple[dict[Any, Any], Any]] = {}  # registered stack -> where, and its key there
        self._last_prefix_id = EMPTY_PREFIX

    def blocks_for(self, n_tokens: int) -> int:
        """How many blocks, one after the other, `n_tokens` tokens take."""
        return -(-n_tokens // self.block_size)

    def stack(self, first: int) -> tuple[int, ...]:
        """The blocks of a stack in use, one for each table of its group."""
        return self._stacks[first]

    def match(self, tokens: list[int], max_stacks: int) -> Match:
        """The longest registered prefix of at most `max_stacks` stacks, whose next token finds all that it sees."""
        stacks: list[int] = []
        prefix_ids = [EMPTY_PREFIX]
        for start in range(0, max_stacks * self.block_size, self.block_size):
            found = self._by_content.get((prefix_ids[-1], tuple(tokens[start : start + self.block_size])))
            if found is None:
                break
            prefix_ids.append(found[0])
            stacks.append(found[1])
        if not self.has_windows:
            return Match(len(stacks), prefix_ids[-1], [stacks], [0])
        of_groups = [stacks, *([each.get(i, self.scratch) for i in prefix_ids[1:]] for each in self._by_prefix[1:])]
        n_stacks = self._longest(of_groups)
        n_behind = [group.first_seen(n_stacks * self.block_size, self.block_size) for group in self.groups]
        for each, n in zip(of_groups, n_behind, strict=True):
            each[n_stacks:], each[:n] = [], [self.scratch] * n
        return Match(n_stacks, prefix_ids[n_stacks], of_groups, n_behind)

    def _longest(self, of_groups: list[list[int]]) -> int:
        """The most stacks after which a token finds, in each group, those that it sees."""
        longest, runs = 0, [0] * len(of_groups)  # the last ones that are there, one after the other
        for n, stacks in enumerate(zip(*of_groups, strict=True), start=1):
            runs = [0 if stack == self.scratch else run + 1 for run, stack in zip(runs, stacks, strict=True)]
            seen = [n - group.first_seen(n * self.block_size, self.block_size) for group in self.groups]
            if all(run >= n_seen for run, n_seen in zip(runs, seen, strict=True)):
                longest = n
        return longest

    def can_allocate(self, shared: Iterable[int], n_new: int, reserve: int = 0) -> bool:
        """Whether `reserve` blocks remain available after acquiring stacks and allocating `n_new` blocks."""
        revived = sum(len(self._stacks[stack]) for stack in shared if stack in self._cached)
        return self.n_available - revived - n_new >= reserve

    def acquire(self, stacks: Iterable[int]) -> None:
        """Add one reference to each of these stacks, which are in use or cached."""
        for stack in stacks:
            if self._ref_counts[stack] == 0:
                del self._cached[stack]
                self.n_available -= len(self._stacks[stack])
            self._ref_counts[stack] += 1

    def allocate(self, group: int = 0) -> int:
        """Take an empty stack, with a reference count of one. The caller has checked `n_available`."""
        n_blocks = self.groups[group].n_tables
        while len(self._free) < n_blocks:
            evicted, _ = self._cached.popitem(last=False)
            where, key = self._content.pop(evicted)
            del where[key]
            self._free.extend(self._stacks[evicted])
        blocks = tuple([self._free.popleft() for _ in range(n_blocks)])
        self.n_available -= n_blocks
        self._stacks[blocks[0]] = blocks
        self._ref_counts[blocks[0]] = 1
        return blocks[0]

    def release(self, stacks: list[int]) -> None:
        """Drop one reference to each of these stacks, given in the order of their positions."""
        # A later one is useful only together with the earlier ones, so it must be evicted before them.
        for stack in reversed(stacks):
            self._ref_counts[stack] -= 1
            if self._ref_counts[stack] == 0:
                self.n_available += len(self._stacks[stack])
                if stack in self._content:
                    self._cached[stack] = None
                else:
                    self._free.extend(self._stacks[stack])

    def register(self, stack: int, before: int, tokens: tuple[int, ...]) -> int:
        """Make a full stack of the first group findable after the prefix `before`; returns the id of what it completes.

        If another one with this content is registered already, that one stays and its prefix id is returned.
        """
        key = (before, tokens)
        found = self._by_content.get(key)
        if found is not None:
            return found[0]
        self._last_prefix_id += 1
        self._by_content[key] = (self._last_prefix_id, stack)
        self._content[stack] = self._by_content, key
        return self._last_prefix_id

    def register_end(self, stack: int, group: int, prefix_id: int) -> None:
        """Make a full stack of another group findable as the end of a prefix, unless there is one already."""
        if prefix_id not in self._by_prefix[group]:
            self._by_prefix[group][prefix_id] = stack
            self._content[stack] = self._by_prefix[group], prefix_id

    def reset(self) -> None:
        """Forget all content. Blocks in use stay in use; prefix ids returned before must not be used again."""
        for found in (self._by_content, *self._by_prefix, self._content):
            found.clear()
        for stack in self._cached:
            self._free.extend(self._stacks[stack])
        self._cached.clear()
