"""The assignment of attention layers to KV blocks and block tables.

A pool block holds the keys and values of `layers_per_block` layers, for `block_size` tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from areno.models.config import TransformerConfig

_MAX_TABLES = 8  # each costs the host a table entry for every block that a sequence gets
_WORTH_IT = 0.9  # groups must need less than this share of the memory that one group needs


@dataclass(frozen=True, slots=True)
class KVGroup:
    window: int | None  # tokens that a token attends to, itself included; None for full attention
    n_tables: int = 1

    def first_visible_block(self, position: int, block_size: int) -> int:
        """Return the index of the oldest block that the token at `position` or a later one attends to."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // block_size

    def max_group_blocks_held(self, n_tokens: int, block_size: int) -> int:
        """Return the largest number of blocks that a sequence has in one block table at the same time."""
        n_group_blocks = -(-n_tokens // block_size)
        # Those that a window touches, and one more: the next one is taken before a step, and some are let go after it.
        return n_group_blocks if self.window is None else min(n_group_blocks, -(-(self.window - 1) // block_size) + 2)


def n_tables_with_windows(groups: Iterable[KVGroup]) -> int:
    return sum(group.n_tables for group in groups if group.window is not None)


@dataclass(frozen=True, slots=True)
class KVLayout:
    groups: tuple[KVGroup, ...]  # full attention, then the longest window first
    places: tuple[tuple[int, int], ...]  # (block table, index in a block) of each attention layer
    block_size: int

    @staticmethod
    def from_config(config: TransformerConfig, block_size: int, max_len: int, *, by_window: bool = True) -> KVLayout:
        """Return the layout that needs the least memory for a sequence of `max_len` tokens.

        All layers form one group with full attention, unless grouping by window saves more than 10 %.
        """
        windows = [config.layer_kind(layer).window for layer in config.attention_layers]
        layout = KVLayout._from_windows([None] * len(windows), len(windows), block_size)
        fewest = layout.sequence_size(max_len) * _WORTH_IT
        for layers_per_block in range(len(windows), 0, -1) if by_window and any(windows) else ():
            tried = KVLayout._from_windows(windows, layers_per_block, block_size)
            if tried.n_tables <= _MAX_TABLES and tried.sequence_size(max_len) < fewest:
                layout, fewest = tried, tried.sequence_size(max_len)
        return layout

    @staticmethod
    def _from_windows(windows: list[int | None], layers_per_block: int, block_size: int) -> KVLayout:
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
        return 1 + max(place for _, place in self.places)

    @property
    def n_tables(self) -> int:
        return sum(group.n_tables for group in self.groups)

    def pool_blocks(self, n_blocks: int) -> int:
        """Convert `n_blocks` blocks that hold all attention layers to pool blocks, for the same memory."""
        return n_blocks * len(self.places) // self.layers_per_block

    def full_blocks(self, n_blocks: int) -> int:
        """Convert `n_blocks` pool blocks to blocks that hold all attention layers, rounded up."""
        return -(-n_blocks * self.layers_per_block // len(self.places))

    def blocks_for(self, n_tokens: int) -> int:
        """Return the largest number of pool blocks that a sequence of `n_tokens` tokens holds at a time."""
        return sum(group.n_tables * group.max_group_blocks_held(n_tokens, self.block_size) for group in self.groups)

    def blocks_of_chunk(self, n_tokens: int) -> int:
        """Return how many pool blocks a prefill chunk of `n_tokens` tokens takes in layers with sliding windows."""
        return -(-n_tokens // self.block_size) * n_tables_with_windows(self.groups)

    def sequence_size(self, n_tokens: int) -> int:
        """Return the KV memory of a sequence, in units of `block_size` tokens of one layer."""
        return self.blocks_for(n_tokens) * self.layers_per_block

    def max_sequence_tokens(self, n_blocks: int, context_len: int) -> int:
        """Return the length of the longest sequence that fits into `n_blocks` pool blocks.

        If all layers have windows, a sequence of any length may fit. Only then does `context_len` limit the result.
        """
        if self.groups[0].window is None:
            context_len = max(context_len, n_blocks // self.groups[0].n_tables * self.block_size)
        group_blocks = range(-(-context_len // self.block_size) + 1)
        fitting = bisect_right(group_blocks, n_blocks, key=lambda n: self.blocks_for(n * self.block_size)) - 1
        return fitting * self.block_size
