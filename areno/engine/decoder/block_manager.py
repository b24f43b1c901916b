"""Which layers share blocks of the KV cache, and how many blocks a sequence takes. No tensors.

Layers that see equally far make a group. A sequence needs the blocks of all its tokens in a group that sees all of
them, and the blocks of the window alone in one with a window. All groups take blocks of the same pool, so that none of
it lies idle while another group has too little. A block holds `block_size` tokens of `layers_per_block` layers. A group
with more layers has several block tables. For each `block_size` tokens of a sequence it takes one block in each of
them, together: a stack.

Which blocks of the paged KV cache are in use, and which hold a prefix that another request can reuse. No tensors.

What is allocated is a stack: the blocks that a group of layers needs for `block_size` tokens of one sequence
(`kv/layout.py`). It goes by its first block, which is all of it where there is one group. A stack is in one of two
states, and blocks that are in none are free:

    in use    one or more sequences read or write it; its reference count says how many
    cached    no sequence uses it, but it can still be found by content until it is evicted (least recently used first)

A full stack of the first group is registered under (id of the prefix before it, its token ids). The id of a prefix
stands for all of its tokens. The dictionary compares token ids, not hashes alone, so a match is always exact. Stacks of
other groups, which see fewer tokens, are registered under the id of the prefix that ends with them.

The KV blocks of one sequence. No tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from areno.models.config import TransformerConfig

_MOST_TABLES = 8  # each costs the host a table entry for every block that a sequence gets
_WORTH_IT = 0.9  # groups must need less than this share of the memory that one group needs


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same window; None sees all tokens. n_tables: block tables, and blocks of a stack."""

    window: int | None
    n_tables: int = 1

    def first_seen(self, position: int, block_size: int) -> int:
        """The first of its stacks of a sequence that the token at this position, or a later one, reads."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // block_size

    def most_stacks(self, n_tokens: int, block_size: int) -> int:
        """How many stacks a sequence of so many tokens holds at once, at least one of which is not full."""
        n_stacks = -(-n_tokens // block_size)
        # Those that a window touches, and one more: the next one is taken before a step, and some are let go after it.
        return n_stacks if self.window is None else min(n_stacks, -(-(self.window - 1) // block_size) + 2)


def tables_with_windows(groups: Iterable[KVGroup]) -> int:
    """Block tables of the groups that release what lies behind a window."""
    return sum(group.n_tables for group in groups if group.window is not None)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """groups: the one that sees farthest first. places: of each layer with attention its block table, and its place in
    a block.
    """

    groups: tuple[KVGroup, ...]
    places: tuple[tuple[int, int], ...]
    block_size: int

    @staticmethod
    def of(config: TransformerConfig, block_size: int, max_len: int, *, by_window: bool = True) -> KVLayout:
        """What takes the least memory for a sequence of `max_len` tokens.

        by_window: else one group, which releases nothing.
        """
        windows = [config.kind(layer).window for layer in config.attention_layers]
        layout = KVLayout._with([None] * len(windows), len(windows), block_size)
        fewest = layout.bytes_of(max_len) * _WORTH_IT
        for layers_per_block in range(len(windows), 0, -1) if by_window and any(windows) else ():
            tried = KVLayout._with(windows, layers_per_block, block_size)
            if tried.n_tables <= _MOST_TABLES and tried.bytes_of(max_len) < fewest:
                layout, fewest = tried, tried.bytes_of(max_len)
        return layout

    @staticmethod
    def _with(windows: list[int | None], layers_per_block: int, block_size: int) -> KVLayout:
        """windows: of each layer."""
        groups: list[KVGroup] = []
        places: dict[int, tuple[int, int]] = {}
        for window in sorted(set(windows), key=lambda each: float("-inf") if each is None else -each):
            first_table = sum(group.n_tables for group in groups)
            layers = [layer for layer, each in enumerate(windows) if each == window]
            for index, layer in enumerate(layers):
                places[layer] = first_table + index // layers_per_block, index % layers_per_block
            groups.append(KVGroup(window, -(-len(layers) // layers_per_block)))
        return KVLayout(tuple(groups), tuple(places[layer] for layer in range(len(windows))), block_size)

    @property
    def layers_per_block(self) -> int:
        """Layers whose keys and values a block has room for."""
        return 1 + max(place for _, place in self.places)

    @property
    def n_tables(self) -> int:
        """Block tables of all groups."""
        return sum(group.n_tables for group in self.groups)

    def pool_size(self, n_blocks: int) -> int:
        """How many blocks the memory of `n_blocks` of all layers makes."""
        return n_blocks * len(self.places) // self.layers_per_block

    def memory_of(self, n_blocks: int) -> int:
        """In blocks of all layers, what so many blocks of the pool take; rounded up."""
        return -(-n_blocks * self.layers_per_block // len(self.places))

    def blocks_for(self, n_tokens: int) -> int:
        """Most blocks of the pool that one sequence of so many tokens holds at once."""
        return sum(group.n_tables * group.most_stacks(n_tokens, self.block_size) for group in self.groups)

    def blocks_of_chunk(self, n_tokens: int) -> int:
        """What a chunk of a prompt takes of the pool in layers with windows. The next step releases most of it."""
        return -(-n_tokens // self.block_size) * tables_with_windows(self.groups)

    def bytes_of(self, n_tokens: int) -> int:
        """The memory of these blocks, in units of `block_size` tokens of one layer."""
        return self.blocks_for(n_tokens) * self.layers_per_block

    def most_tokens(self, n_blocks: int, context_len: int) -> int:
        """Tokens of the longest sequence that fits `n_blocks` of the pool by itself.

        context_len: of the model, which bounds it where windows do not.
        """
        if self.groups[0].window is None:
            context_len = max(context_len, n_blocks // self.groups[0].n_tables * self.block_size)
        stacks = range(-(-context_len // self.block_size) + 1)
        fitting = bisect_right(stacks, n_blocks, key=lambda n: self.blocks_for(n * self.block_size)) - 1
        return fitting * self.block_size


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


class HeldBlocks:
    """What one sequence holds in each group of layers, from its admission on until it leaves the cache.

    stacks: for each group, one for every `block_size` of its positions. The first `n_behind` of them are no longer its
    own, because they lie behind the window of the group. room: positions that have stacks in all groups.
    """

    __slots__ = ("_blocks", "n_behind", "n_registered", "n_uploaded", "prefix_id", "room", "stacks")

    def __init__(self, blocks: BlockManager):
        n_groups = len(blocks.groups)
        self._blocks = blocks
        self.stacks: list[list[int]] = [[] for _ in range(n_groups)]
        self.n_behind = [0] * n_groups
        self.room = 0
        self.n_uploaded = 0  # how many stacks of each group are in the device's tables
        self.n_registered = 0  # how many of them can be found by content
        self.prefix_id = EMPTY_PREFIX  # of the prefix that ends with the last registered stack

    def begin(self, match: Match, n_tokens: int) -> int:
        """Take over a prefix that was found. A group without a window takes stacks for all `n_tokens` at once.

        Returns the blocks of these stacks.
        """
        blocks, n_taken = self._blocks, 0
        blocks.acquire(match.found())
        self.stacks, self.n_behind = match.stacks, match.n_behind
        self.n_registered, self.prefix_id = match.n_stacks, match.prefix_id
        for group, stacks in enumerate(self.stacks):
            if blocks.groups[group].window is None:
                n_new = blocks.blocks_for(n_tokens) - len(stacks)
                stacks += [blocks.allocate(group) for _ in range(n_new)]
                n_taken += n_new * blocks.groups[group].n_tables
        self._measure()
        return n_taken

    def begin_last(self) -> None:
        """Take one stack in each group: the part of a prompt that does not fill one, until `follow` brings the rest."""
        for group, stacks in enumerate(self.stacks):
            stacks.append(self._blocks.allocate(group))

    def follow(self, leader: HeldBlocks, n_shared: int) -> None:
        """Share the first `n_shared` stacks of the sequence that has computed the prompt."""
        for group, first in enumerate(leader.n_behind):
            shared = leader.stacks[group][:n_shared]
            self._blocks.acquire(shared[first:])
            self.stacks[group][:0] = shared
        self.n_behind, self.room = list(leader.n_behind), leader.room
        self.n_registered, self.prefix_id = leader.n_registered, leader.prefix_id

    def extend(self, end: int) -> None:
        """Take stacks for the positions up to `end` in the groups that lack them."""
        blocks = self._blocks
        for group, stacks in enumerate(self.stacks):
            for _ in range(blocks.blocks_for(end) - len(stacks)):
                stacks.append(blocks.allocate(group))
        self._measure()

    def grow(self) -> None:
        """Take one more stack in each group, which all have the same number."""
        for group, stacks in enumerate(self.stacks):
            stacks.append(self._blocks.allocate(group))
        self.room += self._blocks.block_size

    def release_behind(self, position: int) -> None:
        """Release what neither the token at this position nor a later one reads, once it can be found by content."""
        blocks = self._blocks
        for group, stacks in enumerate(self.stacks):
            behind = min(blocks.groups[group].first_seen(position, blocks.block_size), self.n_registered)
            if behind > self.n_behind[group]:
                blocks.release(stacks[self.n_behind[group] : behind])
                self.n_behind[group] = behind

    def register(self, tokens: list[int], n_tokens: int) -> None:
        """Make the full stacks among the first `n_tokens` tokens (known, and cached) findable by content."""
        blocks, size = self._blocks, self._blocks.block_size
        for i in range(self.n_registered, n_tokens // size):
            content = tuple(tokens[i * size : (i + 1) * size])
            self.prefix_id = blocks.register(self.stacks[0][i], self.prefix_id, content)
            for group in range(1, len(self.stacks)):
                blocks.register_end(self.stacks[group][i], group, self.prefix_id)
            self.n_registered = i + 1

    def new_entries(self, slot: int) -> list[tuple[int, int, int, int]]:
        """(table, slot, column, block) of what the device's tables do not have yet; it counts as there from now on."""
        entries: list[tuple[int, int, int, int]] = []
        table = 0
        for group, stacks in enumerate(self.stacks):
            for column in range(max(self.n_uploaded, self.n_behind[group]), len(stacks)):
                for i, block in enumerate(self._blocks.stack(stacks[column])):
                    entries.append((table + i, slot, column, block))
            table += self._blocks.groups[group].n_tables
        self.n_uploaded = len(self.stacks[0])
        return entries

    def release(self) -> None:
        """Give everything back."""
        for stacks, behind in zip(self.stacks, self.n_behind, strict=True):
            self._blocks.release(stacks[behind:])

    def _measure(self) -> None:
        self.room = min(map(len, self.stacks)) * self._blocks.block_size
