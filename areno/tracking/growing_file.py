"""A file that grows record by record and never holds half a record."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from areno.errors import ArenoError, Problem


class GrowingFile:
    """Appends whole records. If the disk is full, nothing of the record stays. The file appears with the first one.

    key: the setting that says where the file is; the ArenoError of a file that cannot be written names it.
    """

    def __init__(self, path: Path, key: str):
        self.path, self.key = path, key
        self.size = 0  # bytes
        self._file: BinaryIO | None = None
        with self._naming_the_setting():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def append(self, record: bytes) -> None:
        with self._naming_the_setting():
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # closed by close()
                self.size = self._file.tell()
            try:
                rest = memoryview(record)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self.size)
                raise
            self.size += len(record)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    @contextmanager
    def _naming_the_setting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = "{} cannot be written: {}; free space there or set another folder"
            raise ArenoError(Problem(self.key, text, self.path, error.strerror)) from error
