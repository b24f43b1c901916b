"""The KV blocks of one sequence. No tensors."""

from __future__ import annotations

from areno.engine.decoder.block_manager import EMPTY_PREFIX, BlockManager, Match


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
