"""The blocks of the paged KV cache: who holds which, and which still hold a prefix that can be used again. No tensors.

A block has room for `block_size` tokens of one prefix. It is in exactly one state:

    free      holds nothing of use
    held      by one or more sequences (reference count)
    cached    held by nobody, but findable by content until it is evicted, the least recently used first

A full block is registered under (the entry of the block before it, its token ids). The entry stands for the whole
prefix up to there, and the dictionary compares the ids themselves, so a hit is exact, never a hash collision.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

ROOT = 0  # the entry before the first block


class BlockManager:
    """Allocation, sharing and content lookup of `n_blocks` blocks."""

    def __init__(self, n_blocks: int, block_size: int):
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._free = deque(range(n_blocks))
        self._holders = [0] * n_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # content -> (entry, block)
        self._content: dict[int, tuple[int, tuple[int, ...]]] = {}  # registered block -> its key in `_found`
        self._last_entry = ROOT

    @property
    def n_available(self) -> int:
        """Blocks that can be allocated: free, or cached and so evictable."""
        return len(self._free) + len(self._cached)

    @property
    def n_cached(self) -> int:
        """Blocks that nobody holds but that can be found by content."""
        return len(self._cached)

    def blocks_for(self, n_tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-n_tokens // self.block_size)

    def match(self, tokens: list[int], max_blocks: int) -> tuple[list[int], int]:
        """The longest registered prefix of `tokens`: its blocks (at most `max_blocks`, not yet held) and its entry."""
        blocks: list[int] = []
        entry = ROOT
        for start in range(0, max_blocks * self.block_size, self.block_size):
            found = self._found.get((entry, tuple(tokens[start : start + self.block_size])))
            if found is None:
                break
            entry, block = found
            blocks.append(block)
        return blocks, entry

    def can_take(self, shared: Iterable[int], n_new: int, reserve: int = 0) -> bool:
        """Whether, after holding `shared` too, `n_new` blocks can be allocated with `reserve` left."""
        revived = sum(1 for block in shared if block in self._cached)
        return self.n_available - revived - n_new >= reserve

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks (held or cached)."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1

    def allocate(self) -> int:
        """An empty block with one holder. The caller has looked at `n_available`."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._found[self._content.pop(block)]
        self._holders[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        """One holder less for each. Later blocks are of use only with the earlier ones, so they are evicted first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._content:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, before: int, tokens: tuple[int, ...]) -> int:
        """Make a full held block findable after the entry `before`; returns its entry, to be given for the next block.

        Content that is already registered with another block keeps that one; its entry is returned.
        """
        key = (before, tokens)
        found = self._found.get(key)
        if found is not None:
            return found[0]
        self._last_entry += 1
        self._found[key] = (self._last_entry, block)
        self._content[block] = key
        return self._last_entry

    def forget(self) -> None:
        """Make every content unfindable. Held blocks stay held; entries given out before must not be used again."""
        self._found.clear()
        self._content.clear()
        self._free.extend(self._cached)
        self._cached.clear()
