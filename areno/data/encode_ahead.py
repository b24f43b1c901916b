"""Encode rows in the background, before the training loop needs them.

The data loader gives the rows of the next batches to `BackgroundEncoder.schedule_rows`, and gets their items from
`BackgroundEncoder.pop_items`. A thread encodes the rows. If that takes a large share of the time, several processes
replace the thread, because Python code in a thread delays the training loop.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

from areno import heartbeat
from areno.data.encoder_process import EncoderProcess
from areno.engine.processes.child import dumps
from areno.types import Item

logger = logging.getLogger("areno.data")

CHUNK = 256
"""Rows that are encoded together: enough for all CPU cores, and few enough for a heartbeat in between."""

_LEAST_CHUNK = 16  # rows, so that a message to a process is worth its cost
_TOKENS_AHEAD = 1_000_000  # encoded rows that wait for their use, at most 40 bytes for each token

# Processes start once encoding has taken this many seconds, and this share of the time since the first `schedule_rows`.
# A process takes some seconds to start, and 400 MB of host memory.
_SLOW_S = 1.0
_SLOW_SHARE = 0.1


class BackgroundEncoder(Generic[Item]):
    """Encodes the rows of the next batches in the background, in the order of their use.

    If a row cannot be encoded, its exception takes the place of the item, and the caller raises it when it uses the
    row. `read` returns rows by index, and only one thread at a time calls it. `encode` returns an item or an exception
    for each row. If `encode` itself raises, its rows are encoded one by one, up to the first that raises. `size`
    returns an item's number of tokens. Processes can only encode items of the types AnswersItem and PairItem.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Sequence[Any]],
        encode: Callable[[Sequence[Any], Sequence[int]], Sequence[Item | Exception]],
        size: Callable[[Item], int],
        n_processes: int = 0,
    ) -> None:
        self._read, self._encode, self._size, self._n_processes = read, encode, size, n_processes
        self._changed = threading.Condition()
        self._in_driver = threading.RLock()  # datasets and tokenizers need not work in two threads at the same time
        self._ready: dict[int, Item | Exception] = {}
        self._n_tokens = 0  # of the items in `_ready`
        self._busy: set[int] = set()  # rows that are being encoded
        self._wanted: list[int] = []  # further rows, in the order of their use
        self._at_least = 0
        self._runs = False  # whether the thread runs
        self._began: float | None = None  # time of the first `schedule_rows`
        self._seconds = 0.0  # of encoding in the driver since then
        self._closed = False
        self._starter: threading.Thread | None = None
        self._starting: list[EncoderProcess] = []
        self.processes: list[EncoderProcess] = []

    def schedule_rows(self, indices: Sequence[int], at_least: int) -> None:
        """Set the rows to encode next, in the order of their use. Encoded rows that are not among them are dropped.

        `at_least` rows are encoded however long they are. Further rows are encoded only while the encoded rows have
        fewer than a million tokens together.
        """
        with self._changed:
            if self._began is None:
                self._began, self._seconds = time.monotonic(), 0.0
            self._pop_ready(self._ready.keys() - set(indices))
            self._wanted = [index for index in indices if index not in self._ready and index not in self._busy]
            self._at_least = at_least
            if self._n_processes and self._wanted and self._is_slow():
                n, self._n_processes = self._n_processes, 0
                self._starter = threading.Thread(target=self._start_processes, args=(n,), daemon=True)
                self._starter.start()
            if self._wanted and not self.processes and not self._runs:
                self._runs = True
                threading.Thread(target=self._encode_in_thread, daemon=True, name="areno-rows").start()
            self._changed.notify_all()

    def pop_items(self, indices: Sequence[int]) -> dict[int, Item | Exception]:
        """Return the items of rows, after encoding those that are not ready.

        The encoding thread pauses until the next `schedule_rows`. If a row cannot be read, the exception takes the
        place of its item, and the rows after it are missing.
        """
        with self._changed:
            self._wait_for(indices)
            found = self._pop_ready([index for index in indices if index in self._ready])
        missing = [index for index in indices if index not in found]
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            encoded = self._encode_in_driver(chunk)
            found |= encoded
            heartbeat.beat()
            if len(encoded) < len(chunk):
                break
        return found

    def close(self) -> None:
        """End the processes. Rows that are taken later are encoded in the driver."""
        with self._changed:
            self._closed, self._wanted, self._n_processes = True, [], 0
        if self._starter is not None:
            self._starter.join()
        with self._changed:
            processes = self._starting + self.processes
            self._starting, self.processes = [], []
            self._changed.notify_all()
        for process in processes:
            process.close()
        atexit.unregister(self.close)

    def _wait_for(self, indices: Sequence[int]) -> None:
        """Wait until the processes have encoded the rows. If there are none, wait until the thread has stopped."""
        if missing := dict.fromkeys(index for index in indices if index not in self._ready):
            if self.processes:
                later = [index for index in self._wanted if index not in missing]
                self._wanted = [index for index in missing if index not in self._busy] + later
                self._at_least = max(self._at_least, len(self._ready) + len(self._busy) + len(missing))
                self._changed.notify_all()
            else:
                self._wanted = []
            while self._busy if not self.processes else any(index not in self._ready for index in missing):
                self._changed.wait()
                heartbeat.beat()

    def _pop_ready(self, indices: Iterable[int]) -> dict[int, Item | Exception]:
        dropped = {index: self._ready.pop(index) for index in indices}
        self._n_tokens -= self._count_tokens(dropped)
        return dropped

    def _add_ready(self, encoded: dict[int, Item | Exception]) -> None:
        self._ready |= encoded
        self._n_tokens += self._count_tokens(encoded)

    def _count_tokens(self, encoded: dict[int, Item | Exception]) -> int:
        return sum(self._size(item) for item in encoded.values() if not isinstance(item, Exception))

    def _encode_in_driver(self, indices: Sequence[int]) -> dict[int, Item | Exception]:
        with self._in_driver:
            started = time.monotonic()
            found = self._encode_one_by_one_if_needed(indices)
            self._seconds += time.monotonic() - started
            return found

    def _encode_one_by_one_if_needed(self, indices: Sequence[int]) -> dict[int, Item | Exception]:
        """Encode rows together. If that raises, encode them one by one, up to the first row that raises."""
        try:
            return dict(zip(indices, self._encode(self._read(indices), indices), strict=True))
        except Exception as error:
            if len(indices) == 1:
                return {indices[0]: error}
        found: dict[int, Item | Exception] = {}
        for index in indices:
            found |= self._encode_one_by_one_if_needed([index])
            if isinstance(found[index], Exception):
                break
        return found

    def _encode_in_thread(self) -> None:
        """Run the thread: encode wanted rows until none are left, enough tokens are encoded, or processes take over."""
        while True:
            with self._changed:
                chunk = [] if self.processes else self._next_chunk()
                self._runs = bool(chunk)
                self._changed.notify_all()
            if not chunk:
                return
            self._finish_chunk(chunk, self._encode_in_driver(chunk))

    def _next_chunk(self) -> list[int]:
        """Move the next rows from `_wanted` to `_busy`, and return them. Returns nothing if enough rows are encoded."""
        if len(self._ready) + len(self._busy) >= self._at_least and self._n_tokens >= _TOKENS_AHEAD:
            return []
        size = CHUNK
        if self.processes:  # all of them should have rows
            size = min(CHUNK, max(_LEAST_CHUNK, -(-len(self._wanted) // len(self.processes))))
        chunk, self._wanted = self._wanted[:size], self._wanted[size:]
        self._busy |= set(chunk)
        return chunk

    def _finish_chunk(self, chunk: Sequence[int], encoded: dict[int, Item | Exception]) -> None:
        """Store the `encoded` rows of a chunk in `_ready`. With processes, put its other rows back into `_wanted`."""
        with self._changed:
            self._add_ready(encoded)
            self._busy -= set(chunk)
            if self.processes:
                self._wanted = [index for index in chunk if index not in encoded] + self._wanted
            self._changed.notify_all()

    # -- processes -------------------------------------------------------------------------------------------------

    def _is_slow(self) -> bool:
        """Return whether the driver spends so much time on encoding that processes should be started."""
        if self._began is None or self._seconds < _SLOW_S:
            return False
        return self._seconds > _SLOW_SHARE * (time.monotonic() - self._began)

    def _start_processes(self, n_processes: int) -> None:
        """Start processes, and for each a thread that sends it rows. This method runs in yet another thread."""
        atexit.register(self.close)  # before multiprocessing waits for the processes, which ignore its signal
        try:
            with self._in_driver:
                message = dumps(self._encode)
            for _ in range(n_processes):
                process = EncoderProcess(message)
                with self._changed:
                    self._starting.append(process)
                if self._closed:
                    process.close()
                    return
        except Exception as error:  # the tokenizer cannot be pickled, or the machine allows no further process
            logger.info("rows are encoded in the driver, since no process could be started for it: %s", error)
        for process in list(self._starting):
            threading.Thread(target=self._feed_process, args=(process,), daemon=True, name="areno-rows").start()

    def _feed_process(self, process: EncoderProcess) -> None:
        """Send wanted rows to a process, until it ends or is closed."""
        chunk: list[int] = []
        try:
            process.wait_ready()
            self._on_process_ready(process)
            while True:
                with self._changed:
                    while process in self.processes and not (chunk := self._next_chunk()):
                        self._changed.wait()
                    if process not in self.processes:
                        return
                self._finish_chunk(chunk, self._encode_in_process(process, chunk))
        except Exception as error:  # OSError or EOFError; with any other, rows would be waited for without end
            self._on_process_ended(process, error)
            self._finish_chunk(chunk, {})
        finally:
            process.close()

    def _on_process_ready(self, process: EncoderProcess) -> None:
        """Add a process that has started to `processes`. Processes encode in place of the thread."""
        with self._changed:
            if not self._closed:
                self._starting.remove(process)
                self.processes.append(process)
                if len(self.processes) == 1:
                    logger.info("encoding rows takes much of the time, so processes do it from now on")

    def _on_process_ended(self, process: EncoderProcess, error: Exception) -> None:
        with self._changed:
            for processes in (self._starting, self.processes):
                if process in processes:
                    processes.remove(process)
                    n_left = len(self._starting) + len(self.processes)
                    text = "a process that encodes rows has ended (%s); %d are left"
                    logger.warning(text, type(error).__name__, n_left)

    def _encode_in_process(self, process: EncoderProcess, indices: Sequence[int]) -> dict[int, Item | Exception]:
        """Encode rows in a process. If a row fails there, the driver encodes it again, to get its exception.

        Raises OSError or EOFError if the process has ended.
        """
        try:
            with self._in_driver:
                message = process.pickle_rows(self._read(indices), indices)
        except Exception:  # rows that cannot be read or pickled
            return self._encode_in_driver(indices)
        found: dict[int, Item | Exception] = {}
        for index, item in zip(indices, process.encode(message, indices), strict=True):
            if item is None:
                found |= self._encode_in_driver([index])
            else:
                found[index] = item
        return found
