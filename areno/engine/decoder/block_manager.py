"""KV blocks: their layout over layers, their allocation, the prefix cache, and the blocks of one sequence. No tensors.

Layers with the same window form a group. In a group with full attention, a sequence needs the blocks of all its tokens;
in a group with a window, only the blocks of the window. All groups take blocks from one pool, so no memory is reserved
for a group that does not need it. A block holds `block_size` tokens of `layers_per_block` layers, so a group with more
layers has several block tables. For `block_size` tokens of a sequence, a group needs one block in each of its tables.
These blocks are allocated together and called a stack, identified by its first block.

A stack is in use (one or more sequences refer to it), cached (no sequence refers to it, but the prefix cache can still
find it, until it is evicted, least recently used first) or free.

The prefix cache finds a full stack of the first group by (id of the prefix before it, its token ids). A prefix id
stands for all tokens of the prefix. The dictionary compares token ids, not only hashes, so a match is exact. Stacks of
the other groups are found by the id of the prefix that ends with them.
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
    """Attention layers with the same sliding window. The KV blocks of a group are allocated in stacks.

    A stack is the blocks that hold `block_size` tokens in all layers of the group.

    Attributes:
        window: Number of tokens that a layer attends to. None for full attention.
        n_tables: Number of block tables, which is also the number of blocks in a stack.
    """

    window: int | None
    n_tables: int = 1

    def first_seen(self, position: int, block_size: int) -> int:
        """Return the index of the first KV blocks that the token at `position`, or any later token, reads.

        Args:
            position: Position of the token in its sequence.
            block_size: Tokens in a block.

        Returns:
            The index in units of `block_size` tokens. 0 for full attention.
        """
        return 0 if self.window is None else max(0, position + 1 - self.window) // block_size

    def most_stacks(self, n_tokens: int, block_size: int) -> int:
        """Return the largest number of stacks (KV blocks for `block_size` tokens) that a sequence holds at once.

        Args:
            n_tokens: Number of tokens in the sequence.
            block_size: Tokens in a block.
        """
        n_stacks = -(-n_tokens // block_size)
        # The stacks that a window touches, plus one: a new stack is allocated before old stacks are freed.
        return n_stacks if self.window is None else min(n_stacks, -(-(self.window - 1) // block_size) + 2)


def tables_with_windows(groups: Iterable[KVGroup]) -> int:
    """Return the number of block tables of all groups of layers that have a sliding window."""
    return sum(group.n_tables for group in groups if group.window is not None)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The distribution of attention layers over block tables.

    Attributes:
        groups: Groups of layers, the group with the longest window first.
        places: For each attention layer, the index of its block table and its index among the layers of a block.
        block_size: Tokens in a block.
    """

    groups: tuple[KVGroup, ...]
    places: tuple[tuple[int, int], ...]
    block_size: int

    @staticmethod
    def of(config: TransformerConfig, block_size: int, max_len: int, *, by_window: bool = True) -> KVLayout:
        """Return the layout with the least memory for a sequence of `max_len` tokens.

        Args:
            config: Shape of the model.
            block_size: Tokens in a block.
            max_len: Expected length of sequences, in tokens.
            by_window: Whether to group layers by window. False makes one group, in which a sequence keeps all its
                blocks.
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
        """Return the layout for the window of each layer and a number of layers in a block."""
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
        """Number of layers in a block."""
        return 1 + max(place for _, place in self.places)

    @property
    def n_tables(self) -> int:
        """Number of block tables, over all groups of layers."""
        return sum(group.n_tables for group in self.groups)

    def pool_size(self, n_blocks: int) -> int:
        """Convert memory, given as a number of blocks with all layers, to a number of pool blocks.

        A pool block holds `layers_per_block` layers.
        """
        return n_blocks * len(self.places) // self.layers_per_block

    def memory_of(self, n_blocks: int) -> int:
        """Convert a number of pool blocks to a number of blocks with all layers, rounded up."""
        return -(-n_blocks * self.layers_per_block // len(self.places))

    def blocks_for(self, n_tokens: int) -> int:
        """Return the largest number of pool blocks that a sequence of `n_tokens` tokens holds at the same time."""
        return sum(group.n_tables * group.most_stacks(n_tokens, self.block_size) for group in self.groups)

    def blocks_of_chunk(self, n_tokens: int) -> int:
        """Return the number of pool blocks that a prefill chunk takes in layers with windows.

        The next step frees most of them.
        """
        return -(-n_tokens // self.block_size) * tables_with_windows(self.groups)

    def bytes_of(self, n_tokens: int) -> int:
        """Return the memory of a sequence of `n_tokens` tokens, in units of `block_size` tokens of one layer."""
        return self.blocks_for(n_tokens) * self.layers_per_block

    def most_tokens(self, n_blocks: int, context_len: int) -> int:
        """Return the length, in tokens, of the longest sequence that fits `n_blocks` pool blocks alone.

        Args:
            n_blocks: Number of pool blocks.
            context_len: Context of the model in tokens. It bounds the result if all layers have windows.
        """
        if self.groups[0].window is None:
            context_len = max(context_len, n_blocks // self.groups[0].n_tables * self.block_size)
        stacks = range(-(-context_len // self.block_size) + 1)
        fitting = bisect_right(stacks, n_blocks, key=lambda n: self.blocks_for(n * self.block_size)) - 1
        return fitting * self.block_size


EMPTY_PREFIX = 0  # id of the prefix before the first block


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix of a prompt. The sequence must still acquire its stacks.

    A stack is the KV blocks of one group of layers for `block_size` tokens.

    Attributes:
        n_stacks: Length of the prefix, in stacks.
        prefix_id: Id of the prefix.
        stacks: For each group, `n_stacks` stacks. The scratch block stands for stacks that lie before the window.
        n_behind: For each group, the number of stacks before the window.
    """

    n_stacks: int
    prefix_id: int
    stacks: list[list[int]]
    n_behind: list[int]

    def found(self) -> list[int]:
        """Return the stacks of all groups that the sequence must acquire."""
        return [stack for each, n in zip(self.stacks, self.n_behind, strict=True) for stack in each[n:]]


class BlockManager:
    """Allocates KV blocks, shares them between sequences, and finds cached prefixes.

    Blocks are handled in stacks. A stack is the blocks of one group of layers for `block_size` tokens, and is
    identified by its first block.

    Args:
        n_blocks: Number of blocks in the pool.
        block_size: Tokens in a block.
        groups: Groups of layers, the group with the longest window first.

    Attributes:
        scratch: Index of the scratch block, which stands for a missing stack.
        per_stack: Number of blocks in one stack of every group together.
        per_window_stack: Number of blocks in one stack of every group with a window together.
        has_windows: Whether any group has a window.
        n_available: Number of blocks that are free or can be evicted.
    """

    def __init__(self, n_blocks: int, block_size: int, groups: Sequence[KVGroup] = (KVGroup(None),)):
        self.n_blocks, self.block_size, self.groups = n_blocks, block_size, tuple(groups)
        self.scratch = n_blocks
        self.per_stack = sum(group.n_tables for group in groups)
        self.per_window_stack = tables_with_windows(groups)
        self.has_windows = self.per_window_stack > 0
        self.n_available = n_blocks
        self._free = deque(range(n_blocks))
        self._ref_counts = [0] * n_blocks
        self._stacks: list[tuple[int, ...]] = [(block,) for block in range(n_blocks)]  # by the first block
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_content: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # content -> (prefix id, stack)
        self._by_prefix: list[dict[int, int]] = [{} for _ in groups]  # by group: prefix id -> stack
        self._content: dict[int, tuple[dict[Any, Any], Any]] = {}  # registered stack -> its dictionary, its key
        self._last_prefix_id = EMPTY_PREFIX

    def blocks_for(self, n_tokens: int) -> int:
        """Return the number of blocks that `n_tokens` tokens take in one block table."""
        return -(-n_tokens // self.block_size)

    def stack(self, first: int) -> tuple[int, ...]:
        """Return the blocks of a stack that is in use, one for each block table of its group of layers.

        Args:
            first: First block of the stack.
        """
        return self._stacks[first]

    def match(self, tokens: list[int], max_stacks: int) -> Match:
        """Return the longest cached prefix of a prompt that can be used.

        A prefix can be used if, in every group, all stacks within the window of the token after the prefix are cached.

        Args:
            tokens: Token ids of the prompt.
            max_stacks: Longest prefix, in stacks.
        """
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
        """Return the number of stacks in the longest prefix whose next token finds all stacks of its window.

        `of_groups` has, for each group, the cached stack at each index, or scratch if the stack is missing.
        """
        longest, runs = 0, [0] * len(of_groups)  # by group, consecutive stacks up to here
        for n, stacks in enumerate(zip(*of_groups, strict=True), start=1):
            runs = [0 if stack == self.scratch else run + 1 for run, stack in zip(runs, stacks, strict=True)]
            seen = [n - group.first_seen(n * self.block_size, self.block_size) for group in self.groups]
            if all(run >= n_seen for run, n_seen in zip(runs, seen, strict=True)):
                longest = n
        return longest

    def can_allocate(self, shared: Iterable[int], n_new: int, reserve: int = 0) -> bool:
        """Return whether enough blocks are available to acquire cached stacks and to allocate new blocks.

        Args:
            shared: First blocks of the stacks to acquire. Those that no sequence uses are no longer available then.
            n_new: Number of blocks to allocate.
            reserve: Number of blocks that must stay available.
        """
        revived = sum(len(self._stacks[stack]) for stack in shared if stack in self._cached)
        return self.n_available - revived - n_new >= reserve

    def acquire(self, stacks: Iterable[int]) -> None:
        """Add one reference to each stack of KV blocks.

        Args:
            stacks: First blocks of the stacks, which must be in use or cached.
        """
        for stack in stacks:
            if self._ref_counts[stack] == 0:
                del self._cached[stack]
                self.n_available -= len(self._stacks[stack])
            self._ref_counts[stack] += 1

    def allocate(self, group: int = 0) -> int:
        """Allocate the KV blocks for `block_size` tokens in one group of layers (a stack), with one reference.

        Evicts cached stacks if necessary. The caller has checked that `n_available` suffices.

        Args:
            group: Index of the group.

        Returns:
            The first block of the stack.
        """
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
        """Drop one reference to each stack of KV blocks. Unreferenced stacks become cached or free.

        Args:
            stacks: First blocks of the stacks, in the order of their positions.
        """
        # A later stack is useful only together with the earlier stacks, so it must be evicted before them.
        for stack in reversed(stacks):
            self._ref_counts[stack] -= 1
            if self._ref_counts[stack] == 0:
                self.n_available += len(self._stacks[stack])
                if stack in self._content:
                    self._cached[stack] = None
                else:
                    self._free.extend(self._stacks[stack])

    def register(self, stack: int, before: int, tokens: tuple[int, ...]) -> int:
        """Add full KV blocks of the first group of layers to the prefix cache.

        Args:
            stack: First block of the stack, which holds `block_size` tokens.
            before: Id of the prefix that ends before the stack.
            tokens: Token ids of the stack.

        Returns:
            The id of the prefix that ends with the stack. If another stack with the same content is cached already,
            the cache keeps it, and the id of its prefix is returned.
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
        """Add full KV blocks of another group of layers to the prefix cache, unless the prefix has such blocks.

        Args:
            stack: First block of the stack, which holds `block_size` tokens.
            group: Index of the group, at least 1. The first group uses `register`.
            prefix_id: Id of the prefix that ends with the stack.
        """
        if prefix_id not in self._by_prefix[group]:
            self._by_prefix[group][prefix_id] = stack
            self._content[stack] = self._by_prefix[group], prefix_id

    def reset(self) -> None:
        """Empty the prefix cache. Blocks in use stay in use. Earlier prefix ids become invalid."""
        for found in (self._by_content, *self._by_prefix, self._content):
            found.clear()
        for stack in self._cached:
            self._free.extend(self._stacks[stack])
        self._cached.clear()


class HeldBlocks:
    """The KV blocks of one sequence, from its admission until it leaves the cache.

    A stack is the KV blocks of one group of layers for `block_size` positions.

    Attributes:
        stacks: For each group, one stack for every `block_size` positions, by its first block.
        n_behind: For each group, the number of first stacks that are freed, because they lie before the window.
        room: Number of positions that have stacks in all groups.
        n_uploaded: Number of stacks in each group whose blocks are in the device's tables.
        n_registered: Number of stacks in each group that are in the prefix cache.
        prefix_id: Id of the prefix that ends with the last registered stack.
    """

    __slots__ = ("_blocks", "n_behind", "n_registered", "n_uploaded", "prefix_id", "room", "stacks")

    def __init__(self, blocks: BlockManager):
        n_groups = len(blocks.groups)
        self._blocks = blocks
        self.stacks: list[list[int]] = [[] for _ in range(n_groups)]
        self.n_behind = [0] * n_groups
        self.room = 0
        self.n_uploaded = 0
        self.n_registered = 0
        self.prefix_id = EMPTY_PREFIX

    def begin(self, match: Match, n_tokens: int) -> int:
        """Acquire the KV blocks of a cached prefix. Layers without a window also get blocks for all tokens.

        Args:
            match: The cached prefix.
            n_tokens: Number of tokens of the sequence.

        Returns:
            The number of newly allocated blocks.
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
        """Allocate the KV blocks for the partly filled end of a prompt that another sequence computes.

        `follow` adds the shared blocks before it.
        """
        for group, stacks in enumerate(self.stacks):
            stacks.append(self._blocks.allocate(group))

    def follow(self, leader: HeldBlocks, n_shared: int) -> None:
        """Share the full KV blocks of a prompt that another sequence has computed.

        Args:
            leader: Blocks of the other sequence.
            n_shared: Number of full blocks in the prompt.
        """
        for group, first in enumerate(leader.n_behind):
            shared = leader.stacks[group][:n_shared]
            self._blocks.acquire(shared[first:])
            self.stacks[group][:0] = shared
        self.n_behind, self.room = list(leader.n_behind), leader.room
        self.n_registered, self.prefix_id = leader.n_registered, leader.prefix_id

    def extend(self, end: int) -> None:
        """Allocate the missing KV blocks for the first `end` positions, in all layers."""
        blocks = self._blocks
        for group, stacks in enumerate(self.stacks):
            for _ in range(blocks.blocks_for(end) - len(stacks)):
                stacks.append(blocks.allocate(group))
        self._measure()

    def grow(self) -> None:
        """Allocate the KV blocks for the next `block_size` positions, in all layers."""
        for group, stacks in enumerate(self.stacks):
            stacks.append(self._blocks.allocate(group))
        self.room += self._blocks.block_size

    def release_behind(self, position: int) -> None:
        """Free KV blocks that lie before the sliding window of the token at `position`, if they are registered."""
        blocks = self._blocks
        for group, stacks in enumerate(self.stacks):
            behind = min(blocks.groups[group].first_seen(position, blocks.block_size), self.n_registered)
            if behind > self.n_behind[group]:
                blocks.release(stacks[self.n_behind[group] : behind])
                self.n_behind[group] = behind

    def register(self, tokens: list[int], n_tokens: int) -> None:
        """Add full KV blocks of the sequence to the prefix cache.

        Args:
            tokens: Token ids of the sequence.
            n_tokens: Number of first tokens whose keys and values are cached.
        """
        blocks, size = self._blocks, self._blocks.block_size
        for i in range(self.n_registered, n_tokens // size):
            content = tuple(tokens[i * size : (i + 1) * size])
            self.prefix_id = blocks.register(self.stacks[0][i], self.prefix_id, content)
            for group in range(1, len(self.stacks)):
                blocks.register_end(self.stacks[group][i], group, self.prefix_id)
            self.n_registered = i + 1

    def new_entries(self, slot: int) -> list[tuple[int, int, int, int]]:
        """Return the entries that the device's block tables lack, and count them as present.

        Args:
            slot: Row of the sequence in the tables.

        Returns:
            Tuples (table, slot, column, block).
        """
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
        """Free all KV blocks of the sequence."""
        for stacks, behind in zip(self.stacks, self.n_behind, strict=True):
            self._blocks.release(stacks[behind:])

    def _measure(self) -> None:
        """Compute `room`, the number of positions that have blocks in all layers."""
        self.room = min(map(len, self.stacks)) * self._blocks.block_size
