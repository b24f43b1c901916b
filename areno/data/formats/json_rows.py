"""Rows from JSON and from JSON lines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from areno.data.checked import SHOWN
from areno.data.formats.opened import not_utf8, open_bytes, open_text, raw_byte
from areno.data.row_schema import Row, describe_value, json_problem
from areno.errors import DataError

_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\d+|[][{}]', re.S)  # of JSON
_DEEP = 300  # levels; json reads some more, depending on the version of Python and on the depth of its caller


def read_json(file: Path, shown: str, split: str) -> list[Row]:
    """Read a list of rows, an object that holds one under `data` or under the split, or JSON lines.

    Args:
        file: the file.
        shown: its name in messages.
        split: the key to read, where the file has several splits.

    Raises:
        DataError: with the line of what is wrong.
        OSError: if the file cannot be read.
    """
    with open_bytes(file, shown) as source:
        text = source.read().decode("utf-8-sig", "surrogateescape")
    if (raw := raw_byte(text)) is not None:
        raise DataError(f"{shown} line {_line(text, raw)}: {not_utf8(text, raw)}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return read_jsonl(file, shown)  # one JSON value on each line, under the wrong name
        place, what = _json_fault(text, error)
        raise DataError(f"{shown} line {_line(text, place)}: {what}") from error
    if isinstance(content, dict):
        for name in ("data", split):
            if isinstance(content.get(name), list):
                return content[name]
    if not isinstance(content, list):
        raise DataError(f'{shown}: holds {describe_value(content)}; expected a list of rows, or {{"data": [rows]}}')
    return content


def read_jsonl(file: Path, shown: str) -> list[Row]:
    """Read one JSON value from each line that is not empty. Raises as `read_json`, with all lines that are wrong."""
    rows = []
    faults = []
    with open_text(file, shown) as lines:
        for number, line in enumerate(lines, start=1):
            if (raw := raw_byte(line)) is not None:
                faults.append(f"line {number}: {not_utf8(line, raw)}")
                continue
            try:
                if line.strip():
                    rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                faults.append(f"line {number}: {_json_fault(line, error)[1]}")
    if faults:
        more = f"; and {len(faults) - SHOWN} more lines" if len(faults) > SHOWN else ""
        raise DataError("{} {}{}", shown, "; ".join(faults[:SHOWN]), more)
    return rows


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _json_fault(text: str, error: ValueError | RecursionError) -> tuple[int, str]:
    """Return where and why the text is not read as JSON."""
    if isinstance(error, json.JSONDecodeError):
        return error.pos, f"not JSON: {json_problem(error)}"
    depth, most_digits = 0, sys.get_int_max_str_digits()  # Python reads a number in quadratic time
    for piece in _PIECE.finditer(text):
        depth += (piece[0] in "[{") - (piece[0] in "]}")
        if isinstance(error, RecursionError) and depth > _DEEP:
            return piece.start(), "lists or objects are nested too deeply; write the value as a text that holds JSON"
        if piece[0][0] != '"' and len(piece[0]) > most_digits:
            return piece.start(), f"a number has {len(piece[0]):,} digits, more than {most_digits:,}; write it as text"
    return 0, str(error)
