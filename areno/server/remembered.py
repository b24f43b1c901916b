"""What a server remembers of conversations, within a bound for all of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

Key = tuple[str, str]
"""Of the form of a prompt, and of a conversation."""
_OF_AN_ENTRY = 256  # tokens that take about as much memory as an entry without its tokens: 1 to 2 KB


class Remembered:
    """Entries by key. Those that were not used for the longest time are forgotten. Any thread may use it.

    Args:
        most_tokens: Limit on the sum over all entries. Each entry counts its tokens plus 256 for its own overhead.
    """

    def __init__(self, most_tokens: int):
        self._most, self.n_tokens = most_tokens, 0
        self._entries: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Any:
        """Return the entry of a key, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Key, entry: Any, n_tokens: int, text: str = "") -> None:
        """Remember an entry in the place of an earlier one.

        Args:
            key: Of the entry.
            entry: Any object.
            n_tokens: Number of tokens that the entry keeps.
            text: Text that the entry keeps. A long one may have few tokens, where unknown letters become one token.
        """
        size = n_tokens + len(text) // 8 + _OF_AN_ENTRY
        with self._lock:
            self._forget(key)
            self._entries[key] = entry, size
            self.n_tokens += size
            while self.n_tokens > self._most:
                self._forget(next(iter(self._entries)))

    def _forget(self, key: Key) -> None:
        _, n_tokens = self._entries.pop(key, (None, 0))
        self.n_tokens -= n_tokens
