"""Read rows of a large file of JSON lines when they are used. Only the offset of each line is in memory."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from areno.errors import DataError

BLOCK_BYTES = 2**24
_BOM = b"\xef\xbb\xbf"
_CR, _LF, _SPACE, _ASCII = 13, 10, 32, 128


class JsonLines(Sequence[Any]):
    """The rows of a JSON lines file in UTF-8. The caller may close `file`, but its content must not change.

    A line is parsed each time that its row is read. `shown` names the file in errors, and `fault` describes a bad line.
    """

    def __init__(self, file: IO[bytes], shown: str, fault: Callable[[str, ValueError | RecursionError], str]):
        self._file, self._shown, self._fault = os.dup(file.fileno()), shown, fault
        weakref.finalize(self, os.close, self._file)
        self._state = self._size_and_mtime()
        self._starts, self._lengths = _line_offsets_and_lengths(self._file)

    def _size_and_mtime(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(len(self))[index])
        return self.__getitems__([range(len(self))[index]])[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 1000):
            yield from self.__getitems__(range(start, min(start + 1000, len(self))))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if self._size_and_mtime() != self._state:
            raise DataError(f"{self._shown} has changed since it was opened; start again, and leave it as it is")
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> Any:
        start, length = int(self._starts[index]), int(self._lengths[index])
        line = os.pread(self._file, length, start)
        try:
            return json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            what = self._fault(line.decode(errors="surrogateescape"), error)
            raise DataError(f"{self._shown} line {_line_number(self._file, start)}: {what}") from error


def _read_blocks(file: int, end: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (offset, bytes) of consecutive blocks of a file, up to the offset `end`."""
    at = 0
    while data := os.pread(file, BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - at), at):
        yield at, np.frombuffer(data, np.uint8)
        at += len(data)


def _line_offsets_and_lengths(file: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (offset, number of bytes) of each line that is not blank. A line ends with LF, CR or CRLF."""
    start = len(_BOM) if os.pread(file, len(_BOM), 0) == _BOM else 0
    size = os.fstat(file).st_size
    starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
    for at, block in _read_blocks(file):
        ends = np.flatnonzero((block == _LF) | (block == _CR)) + at
        if at + len(block) == size:
            ends = np.append(ends, size)
        if len(ends):
            begins = np.concatenate([[start], ends[:-1] + 1])
            start = int(ends[-1]) + 1
            is_line = ends > begins
            starts.append(begins[is_line])
            lengths.append((ends - begins)[is_line].astype(np.uint32))
    offsets, sizes = np.concatenate(starts), np.concatenate(lengths)
    blank = [
        index for index in _maybe_blank_lines(file, offsets) if _is_blank(file, int(offsets[index]), int(sizes[index]))
    ]
    return np.delete(offsets, blank), np.delete(sizes, blank)


def _maybe_blank_lines(file: int, offsets: np.ndarray) -> Iterator[int]:
    """Yield the indices of lines whose first character may be white space."""
    for at, block in _read_blocks(file):
        first, last = np.searchsorted(offsets, [at, at + len(block)])
        begins = block[offsets[first:last] - at]
        yield from (np.flatnonzero((begins <= _SPACE) | (begins >= _ASCII)) + first).tolist()


def _is_blank(file: int, start: int, length: int) -> bool:
    return not os.pread(file, length, start).decode(errors="surrogateescape").strip()


def _line_number(file: int, start: int) -> int:
    count, before = 1, 0
    for _, block in _read_blocks(file, start):
        previous = np.concatenate([[before], block[:-1]])
        count += int(np.sum((block == _CR) | ((block == _LF) & (previous != _CR))))
        before = int(block[-1])
    return count
