"""Rows from tables: CSV, Parquet and Arrow files."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

from areno.data.checked import SHOWN
from areno.data.formats.opened import not_utf8, open_bytes, open_text, raw_byte
from areno.data.row_schema import Rows
from areno.errors import DataError, printable

_BLOCK_BYTES = 2**26  # of a CSV file, read at once; no row can be longer


def read_table(file: Path, form: str, shown: str) -> Rows:
    """Read the rows of a table.

    Args:
        file: the file.
        form: its format: .csv, .tsv, .parquet or .arrow.
        shown: its name in messages.

    Raises:
        DataError: with the line or row of what is wrong.
        OSError: if the file cannot be read.
    """
    import pyarrow as pa
    from datasets import Dataset
    from pyarrow import parquet

    try:
        if form in (".csv", ".tsv"):
            table = _read_csv(file, "\t" if form == ".tsv" else ",", shown)
        elif form == ".parquet":
            table = parquet.read_table(file)
        else:
            # The stream form is what `datasets` writes, the file form what pyarrow calls Feather.
            with pa.memory_map(str(file)) as source:
                is_file = source.read(6) == b"ARROW1"
            with pa.memory_map(str(file)) as source:
                reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                table = reader.read_all()
        _check_columns(table.column_names, shown)
        return Dataset(table)
    except (pa.ArrowException, ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{shown}: not a readable {form[1:]} file: {_one_line(error)}") from error


def _check_columns(names: list[str], shown: str) -> None:
    """Raise DataError for a name that several columns have."""
    if repeated := [f"{name!r} {count} times" for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{shown} has the column {', '.join(repeated[:SHOWN])}; give each column a name of its own")


def _read_csv(file: Path, delimiter: str, shown: str) -> Any:
    """Read a table whose cells are text, as they stand in the file: a solution "10" must not become the number 10."""
    import pyarrow as pa
    from pyarrow import csv

    parse, convert = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True), csv.ConvertOptions()
    blocks = csv.ReadOptions(block_size=_BLOCK_BYTES)
    try:
        with open_bytes(file, shown) as source, csv.open_csv(source, blocks, parse) as head:
            names = head.schema.names
        _check_columns(names, shown)  # pyarrow would give only one of them its type
        convert.column_types = dict.fromkeys(names, pa.string())
        with open_bytes(file, shown) as source:
            return csv.read_csv(source, blocks, parse, convert)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:  # the latter for the names of columns
        raise DataError(f"{shown} {_csv_fault(error, file, shown, parse, convert)}") from error


def _csv_fault(error: Exception, file: Path, shown: str, parse: Any, convert: Any) -> str:
    """Say what is wrong with a CSV file. It is read once more, by a single thread, which counts the rows."""
    import pyarrow as pa
    from pyarrow import csv

    with open_text(file, shown) as lines:
        for number, line in enumerate(lines, start=1):
            if (raw := raw_byte(line)) is not None:
                return f"line {number}: {not_utf8(line, raw)}"
    uneven: list[Any] = []
    parse.invalid_row_handler = lambda row: uneven.append(row) or "error"
    with contextlib.suppress(pa.ArrowInvalid), open_bytes(file, shown) as source:
        csv.read_csv(source, csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False), parse, convert)
    if uneven:
        row = uneven[0]
        # pyarrow counts from 1, with the line of names.
        return f"row {row.number - 2}: has {row.actual_columns} cells, but the file has {row.expected_columns} columns"
    return f"is not a readable csv file: {_one_line(error)}"


def _one_line(said: object) -> str:
    return printable(" ".join(str(said).split()))
