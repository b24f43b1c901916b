"""The rows of a dataset beside what the run makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.data.dataset_formats import ConvertedRows
from areno.data.loader import BatchLoader
from areno.data.row_schema import RowTooLong, TiedAnswers
from areno.errors import DataError
from areno.types import AnswersItem, PairItem, TrainSequence

_AT_ONCE = 512


@dataclass(frozen=True)
class EncodedRow:
    index: int
    given: Any  # the row as it stands in the file
    row: Any  # the row in areno's form
    item: Any  # None if the run leaves the row out
    dropped: str = ""  # why

    @property
    def sequences(self) -> list[TrainSequence]:
        """The token sequences that are trained, none for a prompt."""
        if isinstance(self.item, PairItem):
            return [self.item.chosen, self.item.rejected]
        return list(self.item.rows) if isinstance(self.item, AnswersItem) else []

    @property
    def n_tokens(self) -> int:
        return 0 if self.item is None else len(self.item.tokens)


def read_rows(loader: BatchLoader[Any], key: str, most: int) -> list[EncodedRow]:
    """Encode at most `most` rows, evenly chosen, as the run encodes them. Errors name the section `key`."""
    n_rows = len(loader.rows)
    return list(_encoded(loader, key, range(0, n_rows, max(1, -(-n_rows // most)))))


def _encoded(loader: BatchLoader[Any], key: str, indices: Sequence[int]) -> Iterator[EncodedRow]:
    rows, limit = loader.rows, loader.limit
    plain = rows.rows if isinstance(rows, ConvertedRows) else rows
    for start in range(0, len(indices), _AT_ONCE):
        part = indices[start : start + _AT_ONCE]
        read = [rows[index] for index in part]
        for index, row, item in zip(part, read, loader.encode(read, part), strict=True):
            given = plain[index]
            if isinstance(item, TiedAnswers):
                yield EncodedRow(index, given, row, None, "no answer is preferred")
            elif isinstance(item, RowTooLong):
                yield EncodedRow(index, given, row, None, "too long")
            elif isinstance(item, DataError):
                raise DataError(f"{key}: row {index}: {item}")
            elif isinstance(item, Exception):
                raise item
            elif len(item.tokens) > limit.n:
                yield EncodedRow(index, given, row, None, f"more than {limit.n} tokens ({limit.key})")
            else:
                yield EncodedRow(index, given, row, item)


def form_of(row: Any) -> tuple[Any, ...]:
    """Return what rows of one form share: the names and types of their fields that hold something."""
    if not isinstance(row, Mapping):
        return (type(row).__name__,)
    return tuple(sorted((str(name), _kind(value)) for name, value in row.items() if value not in (None, "", [])))


def _kind(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return f"list of {', '.join(sorted(map(str, value[0])))}"
    return type(value).__name__
