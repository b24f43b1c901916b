"""Rows as a training needs them: in our form, by their columns, and each one checked before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areno.data.forms import Converted, recognised, renamed
from areno.data.row_schema import EXPECTED, FIELDS, Row, RowKind, Rows, listed, row_problem
from areno.errors import DataError, Key, Problem

logger = logging.getLogger("areno")

SHOWN = 5  # faulty rows


def fitting(
    rows: Rows, kind: RowKind, setting: str, name: str | Key, *, columns: Mapping[str, str] | None = None, key: str = ""
) -> Rows:
    """`rows` in our form; a DataError names the first faulty ones and how many there are.

    setting, name: where the rows come from, and what messages call them. columns: our field -> its column; without it,
    forms of other tools are recognised. key: the section whose `columns` and `loader` could help; "" for none.
    """
    if len(rows) == 0:
        raise DataError(Problem(setting, "{} has no rows", name))
    if columns:
        try:
            rows = renamed(rows, columns)
        except DataError as error:
            raise DataError(Problem(f"{key}.columns", "{}: {}", name, error)) from error
    elif form := recognised(rows, kind):
        logger.info("%s: %d rows of the form %s: %s", name, len(rows), form.name, form.said)
        rows = Converted(rows, form.convert)
    faults, count = [], 0
    for number, problem in _problems(rows, kind):
        count += 1
        if count <= SHOWN:
            faults.append((number, problem))
    if faults:
        raise DataError(_told(rows, kind, setting, name, key, faults, count))
    return rows


def _problems(rows: Rows, kind: RowKind) -> Iterator[tuple[int, str]]:
    """(number, what is wrong) of each faulty row."""
    convert: Callable[[Row], Any] = rows.converted if isinstance(rows, Converted) else lambda row: row
    plain = rows.rows if isinstance(rows, Converted) else rows
    fields = None if isinstance(rows, Converted) else FIELDS[kind]
    for number, row in enumerate(_iter_fields(plain, fields)):
        try:
            problem = row_problem(convert(row), kind)
        except DataError as error:
            problem = str(error)
        if problem is not None:
            yield number, problem


def _iter_fields(rows: Rows, fields: Sequence[str] | None) -> Iterator[Row]:
    """Every row, reduced to `fields` where that is cheaper: columns of an Arrow table are read in batches."""
    columns = getattr(rows, "column_names", None)
    if columns is None:
        yield from (rows[number] for number in range(len(rows)))
        return
    table: Any = rows
    present = [name for name in columns if fields is None or name in fields]
    if not present:  # one row is enough to report that the fields are missing
        yield {}
        return
    for batch in table.select_columns(present).with_format(None).iter(1000):
        for values in zip(*(batch[name] for name in present), strict=True):
            yield dict(zip(present, values, strict=True))


def _told(
    rows: Rows, kind: RowKind, setting: str, name: str | Key, key: str, faults: Sequence[tuple[int, str]], count: int
) -> list[Problem]:
    number, problem = faults[0]
    said = f"row {number}: {problem}; expected {EXPECTED[kind]}"
    if not isinstance(rows, Converted) and isinstance(rows[number], Mapping):
        said += f"; the row has {listed(rows[number]) or 'no fields'}"
    text, args = "{} {}", [name, said]
    if key:
        text += "; name your columns, as in {}=COLUMN, or set {} to a file.py that makes such rows"
        args += [Key(f"{key}.columns.prompt"), Key(f"{key}.loader")]
    told = [Problem(setting, text, *args)]
    told += [Problem(setting, "{} row {}: {}", name, number, problem) for number, problem in faults[1:]]
    if count > 1:
        shown = f"; the first {SHOWN} are above" if count > SHOWN else ""
        told.append(Problem(setting, "{}: {} of {} rows are faulty{}", name, count, len(rows), shown))
    return told
