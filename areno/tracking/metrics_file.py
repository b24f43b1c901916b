"""Reads logs/metrics.jsonl: all lines in turn, the first and the last line, or one scalar without parsing the rest."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from areno.errors import ArenoError
from areno.files.paths import open_if_exists
from areno.schema.values import format_value
from areno.tracking.series import Series

_TAIL = 2**20  # bytes in which the last line is looked for


class MetricsFile:
    """The metrics of a run, to which the run may still append. A missing file has no lines.

    Methods raise ArenoError with the number of a damaged line. An incomplete last line is left out.
    """

    def __init__(self, path: Path):
        self.path = path

    def records(self) -> Iterator[dict[str, Any]]:
        with open_if_exists(self.path) as file:
            # The run is still writing a last line without its end.
            lines = (line for line in file or () if line.endswith(b"\n"))
            yield from (
                self._check_record(number, record) for number, record in enumerate(parse_lines(self.path, lines), 1)
            )

    def _check_record(self, number: int, record: dict[str, Any]) -> dict[str, Any]:
        if not _is_step(record.get("step")):
            raise ArenoError("{}, line {}: has no step", self.path, number)
        others = [name for name, value in record.items() if type(value) is not float and value is not None]
        if wrong := [name for name in others if not is_number(record[name])]:
            text = "{}, line {}: {} is {}; a number is expected"
            raise ArenoError(text, self.path, number, wrong[0], format_value(record[wrong[0]]))
        return record

    def first_and_last_records(self) -> list[dict[str, Any]]:
        """Return the first and the last line, fewer if there are fewer lines."""
        with self._mapped_content() as content:
            end = content.rfind(b"\n") + 1
            first = content[: content.find(b"\n") + 1].splitlines(keepends=True)
            start = content.rfind(b"\n", max(0, end - _TAIL), max(0, end - 1)) + 1
            last = [content[start:end]] if start else []
        return [self._check_record(1, record) for record in parse_lines(self.path, [*first, *last])]

    def series(self, name: str) -> Series:
        points = list(self.points(name))
        return Series([step for step, _ in points], [value for _, value in points])

    def points(self, name: str) -> Iterator[tuple[int, float]]:
        """Yield (step, value) of one scalar. Nothing else is parsed, so damage elsewhere is not found."""
        key = b"%b: " % json.dumps(name).encode()
        with self._mapped_content() as content:
            place, end = content.find(key), content.rfind(b"\n") + 1
            while 0 <= place < end:
                start, stop = content.rfind(b"\n", 0, place) + 1, content.find(b"\n", place)
                ends = [at for at in (content.find(b",", place, stop), content.find(b"}", place, stop)) if at >= 0]
                value, step = content[place + len(key) : min(ends, default=stop)], self._step_of(content, start, stop)
                try:
                    yield step, math.nan if value == b"null" else float(value)
                except ValueError as error:
                    raise ArenoError(
                        "{}: {} is {}; a number is expected", self.path, name, format_value(value)
                    ) from error
                place = content.find(key, stop)

    def _step_of(self, content: mmap | bytes, start: int, stop: int) -> int:
        head = content[start : min(start + 32, stop)]
        first, _, _ = head.removeprefix(b'{"step": ').partition(b",")
        if first.isdigit():
            return int(first)
        number = content[:start].count(b"\n") + 1
        (record,) = parse_lines(self.path, [content[start:stop]], number)
        return self._check_record(number, record)["step"]

    @contextmanager
    def _mapped_content(self) -> Iterator[mmap | bytes]:
        """Yield the content of the file as a memory map, so that a large file does not fill the memory."""
        with open_if_exists(self.path) as file:
            if file is None or not os.fstat(file.fileno()).st_size:
                yield b""
                return
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                yield content


def parse_lines(path: Path, lines: Iterable[bytes], first: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line. `first` is the number of the first line, for errors."""
    for number, line in enumerate(lines, first):
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # ValueError also for bytes that are not UTF-8
            raise ArenoError("{}, line {}: is not JSON: {}", path, number, error) from error
        if not isinstance(record, dict):
            raise ArenoError("{}, line {}: is not a JSON object", path, number)
        yield record


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def is_number(value: Any) -> bool:
    # JSON may have an integer that is too large for a float.
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300)
