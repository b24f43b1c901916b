"""Which blocks of the paged KV cache are in use, and which hold a prefix that another request can reuse. No tensors.

A block has room for `block_size` tokens of one prefix. It is in exactly one of three states:

    free      holds nothing of use
    in use    one or more sequences read or write it; its reference count says how many
    cached    no sequence uses it, but it can still be found by content until it is evicted (least recently used first)

A full block is registered under (id of the prefix before it, its token ids). The id of a prefix stands for all of its
tokens. The dictionary compares token ids, not hashes alone, so a match is always exact.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

EMPTY_PREFIX = 0  # id of the prefix before the first block


class BlockManager:
    """Allocates, shares and finds `n_blocks` blocks of `block_size` tokens each."""

    def __init__(self, n_blocks: int, block_size: int):
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._free = deque(range(n_blocks))
        self._ref_counts = [0] * n_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_content: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # content -> (prefix id, block)
        self._content: dict[int, tuple[int, tuple[int, ...]]] = {}  # registered block -> its key in `_by_content`
        self._last_prefix_id = EMPTY_PREFIX

    @property
    def n_available(self) -> int:
        """Blocks that can be allocated: the free ones, and the cached ones, which can be evicted."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, n_tokens: int) -> int:
        """How many blocks `n_tokens` tokens take."""
        return -(-n_tokens // self.block_size)

    def match(self, tokens: list[int], max_blocks: int) -> tuple[list[int], int]:
        """The blocks (yet to be acquired) of the longest registered prefix, at most `max_blocks`, and its prefix id."""
        blocks: list[int] = []
        prefix_id = EMPTY_PREFIX
        for start in range(0, max_blocks * self.block_size, self.block_size):
            found = self._by_content.get((prefix_id, tuple(tokens[start : start + self.block_size])))
            if found is None:
                break
            prefix_id, block = found
            blocks.append(block)
        return blocks, prefix_id

    def can_allocate(self, shared: Iterable[int], n_new: int, reserve: int = 0) -> bool:
        """Whether `reserve` blocks remain available after acquiring `shared` and allocating `n_new` blocks."""
        revived = sum(1 for block in shared if block in self._cached)
        return self.n_available - revived - n_new >= reserve

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which are in use or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def allocate(self) -> int:
        """Take an empty block, with a reference count of one. The caller has checked `n_available`."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._by_content[self._content.pop(block)]
        self._ref_counts[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Drop one reference to each of these blocks, given in the order of their positions."""
        # A later block is useful only together with the earlier ones, so it must be evicted before them.
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._content:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, before: int, tokens: tuple[int, ...]) -> int:
        """Make a full block in use findable after the prefix `before`; returns the id of the prefix that it completes.

        If another block with this content is registered already, that one stays and its prefix id is returned.
        """
        key = (before, tokens)
        found = self._by_content.get(key)
        if found is not None:
            return found[0]
        self._last_prefix_id += 1
        self._by_content[key] = (self._last_prefix_id, block)
        self._content[block] = key
        return self._last_prefix_id

    def reset(self) -> None:
        """Forget all content. Blocks in use stay in use; prefix ids returned before must not be used again."""
        self._by_content.clear()
        self._content.clear()
        self._free.extend(self._cached)
        self._cached.clear()
