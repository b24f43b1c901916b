"""Read data files: JSON, JSON lines, CSV, Parquet and Arrow, also with gzip compression.

`format_of` derives the format from the name of a file. The readers do not check rows. They raise a DataError that names
the faulty line or row. `shown` is the name of the file in messages.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any, cast

from areno.data.arrow_rows import memory_mapped_table, without_nulls
from areno.data.dataset_formats import SHOWN
from areno.data.json_lines import JsonLines
from areno.data.row_schema import Row, Rows, describe_json_error, describe_value
from areno.errors import DataError, printable

FORMATS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow")
COMPRESSED = (".json", ".jsonl", ".csv", ".tsv")  # may be followed by .gz; the other formats compress their contents
LARGE_BYTES = 2**25
"""The rows of larger files stay on disk. As Python objects, they would take ten times as much memory."""
_MANY_ROWS = 1_000_000  # parquet may store many equal values in a few bytes
_COMPRESSION = 4  # about the size of text by its size in a .gz file
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def format_of(path: str | Path) -> str | None:
    """Return the data format of a file name, such as ".jsonl" for DATA.JSONL.gz. None if it is not supported."""
    name = Path(path).name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in (COMPRESSED if name.endswith(".gz") else FORMATS) else None


def open_bytes(file: Path, shown: str) -> IO[bytes]:
    """Open a file to read its decompressed bytes. Raises DataError for UTF-16, as written by spreadsheets."""
    source = GzipFile(file) if file.name.lower().endswith(".gz") else file.open("rb")
    if source.peek(2)[:2] in _UTF_16:
        source.close()
        raise DataError(f"{shown} is UTF-16 text; expected UTF-8: save it in this encoding")
    return cast(IO[bytes], source)


def open_text(file: Path, shown: str) -> IO[str]:
    """Open a file to read its decompressed lines.

    A byte that is not UTF-8 becomes a surrogate character, which `surrogate_index` finds later.
    """
    return io.TextIOWrapper(open_bytes(file, shown), encoding="utf-8-sig", errors="surrogateescape")


def surrogate_index(text: str) -> int | None:
    """Return the index of the first surrogate character in a text from `open_text`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def utf8_error(text: str, index: int) -> str:
    """Return a message about the byte that has become the surrogate character at `index`."""
    column = index - text.rfind("\n", 0, index)
    return f"byte 0x{ord(text[index]) - 0xDC00:02x} at character {column} is not UTF-8; save the file as UTF-8"


_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\d+|[][{}]', re.S)  # strings, numbers and brackets of JSON
_MAX_DEPTH = 300  # levels; json reads some more, depending on the version of Python and the depth of its caller


def read_json(file: Path, shown: str, split: str) -> Sequence[Row]:
    """Read a list of rows, or one JSON value per line.

    The list may be in an object, under the key "data" or under the name of the split.
    """
    with open_bytes(file, shown) as source:
        text = source.read().decode("utf-8-sig", "surrogateescape")
    if (raw := surrogate_index(text)) is not None:
        raise DataError(f"{shown} line {_line_number(text, raw)}: {utf8_error(text, raw)}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return read_jsonl(file, shown)  # one JSON value on each line, under the wrong name
        index, what = _json_error(text, error)
        raise DataError(f"{shown} line {_line_number(text, index)}: {what}") from error
    if isinstance(content, dict):
        for name in ("data", split):
            if isinstance(content.get(name), list):
                return content[name]
    if not isinstance(content, list):
        raise DataError(f'{shown}: holds {describe_value(content)}; expected a list of rows, or {{"data": [rows]}}')
    return content


def read_jsonl(file: Path, shown: str) -> Sequence[Row]:
    """Read one JSON value from each line that is not empty. Lines of a large file are parsed when they are used."""
    if _is_large(file):
        with _open_uncompressed(file, shown) as source:
            return JsonLines(source, shown, json_line_error)
    rows = []
    faults = []
    with open_text(file, shown) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.encode()  # raises an error for a byte that is not UTF-8
                if line.strip():
                    rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                faults.append(f"line {number}: {json_line_error(line, error)}")
    if faults:
        more = f"; and {len(faults) - SHOWN} more lines" if len(faults) > SHOWN else ""
        raise DataError("{} {}{}", shown, "; ".join(faults[:SHOWN]), more)
    return rows


def json_line_error(line: str, error: ValueError | RecursionError) -> str:
    """Describe why a line from `open_text` is not UTF-8 or not JSON."""
    raw = surrogate_index(line)
    return _json_error(line, error)[1] if raw is None else utf8_error(line, raw)


def _is_large(file: Path) -> bool:
    return file.stat().st_size * (_COMPRESSION if file.name.lower().endswith(".gz") else 1) > LARGE_BYTES


@contextlib.contextmanager
def _open_uncompressed(file: Path, shown: str) -> Iterator[IO[bytes]]:
    """Open a file for random access. A compressed file is unpacked into a temporary file."""
    with open_bytes(file, shown) as source:
        if not isinstance(source, GzipFile):
            yield source
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(source, unpacked, 2**20)
            unpacked.flush()
            yield unpacked


def _line_number(text: str, index: int) -> int:
    return text.count("\n", 0, index) + 1


def _json_error(text: str, error: ValueError | RecursionError) -> tuple[int, str]:
    """Return (character index, reason) of the error that json.loads raised for a text."""
    if isinstance(error, json.JSONDecodeError):
        return error.pos, f"not JSON: {describe_json_error(error)}"
    depth, most_digits = 0, sys.get_int_max_str_digits()  # Python reads a number in quadratic time
    for piece in _PIECE.finditer(text):
        depth += (piece[0] in "[{") - (piece[0] in "]}")
        if isinstance(error, RecursionError) and depth > _MAX_DEPTH:
            return piece.start(), "lists or objects are nested too deeply; write the value as a text that holds JSON"
        if piece[0][0] != '"' and len(piece[0]) > most_digits:
            return piece.start(), f"a number has {len(piece[0]):,} digits, more than {most_digits:,}; write it as text"
    return 0, str(error)


_BLOCK_BYTES = 2**26  # of a CSV file that are read at once; no row can be longer


def read_table(file: Path, form: str, shown: str) -> Rows:
    """Read a file in the format `form`: .csv, .tsv, .parquet or .arrow. All cells of CSV and TSV are text."""
    import pyarrow as pa
    from datasets import Dataset

    try:
        if form in (".csv", ".tsv"):
            table = _read_csv(file, "\t" if form == ".tsv" else ",", shown)
        elif form == ".parquet":
            table = _read_parquet(file, shown)
        else:
            # `datasets` writes Arrow's stream format, and Feather files have Arrow's file format.
            with pa.memory_map(str(file)) as source:
                is_file = source.read(6) == b"ARROW1"
            with pa.memory_map(str(file)) as source:
                reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                table = reader.read_all()
        _check_columns(table.column_names, shown)
        # Without a fingerprint, the library would copy the whole table to compute one.
        return without_nulls(Dataset(table, fingerprint=uuid.uuid4().hex[:16]))
    except (pa.ArrowException, ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{shown}: not a readable {form[1:]} file: {_error_in_one_line(error)}") from error


def _read_parquet(file: Path, shown: str) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as source:
        groups = (source.metadata.row_group(number) for number in range(source.num_row_groups))
        if source.metadata.num_rows <= _MANY_ROWS and sum(group.total_byte_size for group in groups) <= LARGE_BYTES:
            return parquet.read_table(file)
        _check_columns(source.schema_arrow.names, shown)
        return memory_mapped_table(source.schema_arrow, source.iter_batches(10_000, use_threads=False))


def _check_columns(names: list[str], shown: str) -> None:
    if repeated := [f"{name!r} {count} times" for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{shown} has the column {', '.join(repeated[:SHOWN])}; give each column a name of its own")


def _read_csv(file: Path, delimiter: str, shown: str) -> Any:
    """Read a CSV file with all cells as text, so that a solution "10" does not become the number 10."""
    import pyarrow as pa
    from pyarrow import csv

    parse, convert = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True), csv.ConvertOptions()
    blocks = csv.ReadOptions(block_size=_BLOCK_BYTES)
    try:
        with open_bytes(file, shown) as source, csv.open_csv(source, blocks, parse) as head:
            names = head.schema.names
        _check_columns(names, shown)  # pyarrow would make only one of two equal columns text
        convert.column_types = dict.fromkeys(names, pa.string())
        with open_bytes(file, shown) as source:
            if not _is_large(file):
                return csv.read_csv(source, blocks, parse, convert)
            with csv.open_csv(source, blocks, parse, convert) as batches:
                return memory_mapped_table(batches.schema, batches)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:  # UnicodeDecodeError comes from column names
        raise DataError(f"{shown} {_csv_error(error, file, shown, parse, convert)}") from error


def _csv_error(error: Exception, file: Path, shown: str, parse: Any, convert: Any) -> str:
    """Describe why a CSV file could not be read.

    `error` is the exception of the first reading. The file is read again, in one thread, to find the number of the
    faulty line or row. If no fault is found, `error` is described. `parse` is modified.
    """
    import pyarrow as pa
    from pyarrow import csv

    with open_text(file, shown) as lines:
        for number, line in enumerate(lines, start=1):
            if (raw := surrogate_index(line)) is not None:
                return f"line {number}: {utf8_error(line, raw)}"
    uneven: list[Any] = []
    parse.invalid_row_handler = lambda row: uneven.append(row) or "error"
    with contextlib.suppress(pa.ArrowInvalid), open_bytes(file, shown) as source:
        csv.read_csv(source, csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False), parse, convert)
    if uneven:
        row = uneven[0]
        # pyarrow counts from 1 and includes the header.
        return f"row {row.number - 2}: has {row.actual_columns} cells, but the file has {row.expected_columns} columns"
    return f"is not a readable csv file: {_error_in_one_line(error)}"


def _error_in_one_line(error: object) -> str:
    return printable(" ".join(str(error).split()))
