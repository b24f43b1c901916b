"""Which layers share blocks of the KV cache, and how many blocks a sequence takes. No tensors.

Layers that see equally far make a group. A sequence needs the blocks of all its tokens in a group that sees all of
them, and the blocks of the window alone in one with a window. All groups take blocks of the same pool, so that none of
it lies idle while another group has too little. A block holds `block_size` tokens of `layers_per_block` layers. A group
with more layers has several block tables. For each `block_size` tokens of a sequence it takes one block in each of
them, together: a stack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

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
