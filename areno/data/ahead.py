"""Encode rows in a thread before they are used.

The data loader names the rows of the next batches with `EncodedAhead.want`, and gets their items with
`EncodedAhead.take`, which encodes the rows that the thread has not reached yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic

from areno import heartbeat
from areno.types import Item

CHUNK = 256
"""Rows that are encoded together: enough for all CPU cores, and few enough for a heartbeat in between."""

_TOKENS_AHEAD = 1_000_000  # encoded rows that wait for their use, at most 40 bytes for each token


class EncodedAhead(Generic[Item]):
    """The encoded rows of the next batches, which a thread encodes in the order of their use.

    A row with an error is no special case: its error is stored in the place of the item, and the caller raises it
    when the row is used.

    Args:
        encode: Function of the indices of rows that returns the item of each row, or the exception of a row that cannot
            be encoded. An exception that it raises itself concerns the first row.
        size: Function that returns the number of tokens of an item.
    """

    def __init__(
        self, encode: Callable[[Sequence[int]], Sequence[Item | Exception]], size: Callable[[Item], int]
    ) -> None:
        self._encode, self._size = encode, size
        self._changed = threading.Condition()
        self._ready: dict[int, Item | Exception] = {}
        self._busy: set[int] = set()  # rows that the thread is encoding
        self._wanted: list[int] = []  # further rows, in the order of their use
        self._at_least = 0
        self._runs = False  # whether the thread runs

    def want(self, indices: Sequence[int], at_least: int) -> None:
        """Set the rows to encode next, in the order of their use. Encoded rows that are not among them are dropped.

        Args:
            indices: Indices of the rows.
            at_least: Number of rows that are encoded however long they are. Further rows are encoded only while the
                encoded rows have fewer than a million tokens together.
        """
        with self._changed:
            self._ready = {index: self._ready[index] for index in indices if index in self._ready}
            self._wanted = [index for index in indices if index not in self._ready and index not in self._busy]
            self._at_least = at_least
            if self._wanted and not self._runs:
                self._runs = True
                threading.Thread(target=self._run, daemon=True, name="areno-rows").start()

    def take(self, indices: Sequence[int]) -> dict[int, Item | Exception]:
        """Return rows, and encode those that are not encoded yet. Then the thread stops until the next `want`.

        Args:
            indices: Indices of the rows.

        Returns:
            Index of a row -> its item, or the exception of a row that cannot be encoded. If the rows themselves cannot
            be read from some row on, that row has the exception, and later rows are missing.
        """
        with self._changed:
            if any(index not in self._ready for index in indices):
                # The thread stops, since datasets and tokenizers need not work in two threads at the same time.
                self._wanted = []
                while self._busy:
                    self._changed.wait()
                    heartbeat.beat()
            found = {index: self._ready.pop(index) for index in indices if index in self._ready}
        missing = [index for index in indices if index not in found]
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            encoded = self._encoded(chunk)
            found |= encoded
            heartbeat.beat()
            if len(encoded) < len(chunk):
                break
        return found

    def _encoded(self, indices: Sequence[int]) -> dict[int, Item | Exception]:
        """Encode rows. If that fails as a whole, encode them one by one up to the first row that fails."""
        try:
            return dict(zip(indices, self._encode(indices), strict=True))
        except Exception as error:
            if len(indices) == 1:
                return {indices[0]: error}
        found: dict[int, Item | Exception] = {}
        for index in indices:
            found |= self._encoded([index])
            if isinstance(found[index], Exception):
                break
        return found

    def _run(self) -> None:
        """Encode wanted rows until there are none, or enough tokens are encoded."""
        while True:
            with self._changed:
                self._busy = set()
                chunk = self._next_chunk()
                self._runs = bool(chunk)
                self._busy = set(chunk)
                self._changed.notify_all()
            if not chunk:
                return
            encoded = self._encoded(chunk)
            with self._changed:
                self._ready |= encoded

    def _next_chunk(self) -> list[int]:
        """Remove the next rows to encode from the wanted rows, and return them. Empty if enough rows are encoded."""
        n_due = self._at_least - len(self._ready)
        if n_due <= 0:
            items = [item for item in self._ready.values() if not isinstance(item, Exception)]
            if sum(map(self._size, items)) >= _TOKENS_AHEAD:
                return []
        chunk, self._wanted = self._wanted[:CHUNK], self._wanted[CHUNK:]
        return chunk
