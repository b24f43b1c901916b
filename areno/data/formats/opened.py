"""Data files by their names: which format they have, and their bytes or lines, decompressed."""

from __future__ import annotations

import io
from gzip import GzipFile
from pathlib import Path
from typing import IO, cast

from areno.errors import DataError

FORMATS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow")
COMPRESSED = (".json", ".jsonl", ".csv", ".tsv")  # with .gz after them, too; the others have a compression inside
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def format_of(path: str | Path) -> str | None:
    """Return the format in the name of a file, such as .jsonl for DATA.JSONL.gz, or None for an unknown one."""
    name = Path(path).name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in (COMPRESSED if name.endswith(".gz") else FORMATS) else None


def open_bytes(file: Path, shown: str) -> IO[bytes]:
    """Open a file for its bytes, decompressed. Raises DataError for UTF-16, which spreadsheets and PowerShell write."""
    source = GzipFile(file) if file.name.lower().endswith(".gz") else file.open("rb")
    if source.peek(2)[:2] in _UTF_16:
        source.close()
        raise DataError(f"{shown} is UTF-16 text; expected UTF-8: save it in this encoding")
    return cast(IO[bytes], source)


def open_text(file: Path, shown: str) -> IO[str]:
    """Open a file for its lines. A byte that is not UTF-8 becomes a surrogate, so that `raw_byte` finds its line."""
    return io.TextIOWrapper(open_bytes(file, shown), encoding="utf-8-sig", errors="surrogateescape")


def raw_byte(text: str) -> int | None:
    """Return the place of the first byte that is not UTF-8, in a text decoded with surrogateescape."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def not_utf8(text: str, place: int) -> str:
    """Describe the byte at a place that `raw_byte` found, for a message that names the line."""
    column = place - text.rfind("\n", 0, place)
    return f"byte 0x{ord(text[place]) - 0xDC00:02x} at character {column} is not UTF-8; save the file as UTF-8"
