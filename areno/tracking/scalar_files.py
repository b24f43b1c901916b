"""The trackers that write scalars to files: JSON lines, and the event files of TensorBoard."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from areno.errors import ArenoError, Problem
from areno.tracking.tracker import Tracker


class _ScalarFile(Tracker):
    """A file that appears with its first record and never holds half of one, also on a full disk.

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
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # closed by finish()
                self.size = self._file.tell()
            try:
                rest = memoryview(record)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self.size)
                raise
            self.size += len(record)

    def resume(self, step: int) -> None:
        self.finish()  # it may have been cut back

    def finish(self) -> None:
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


class Jsonl(_ScalarFile):
    """Writes a line for each call: {"step", "time" (seconds since 1970), and the scalars}; null if not finite."""

    def __init__(self, path: str | Path):
        super().__init__(Path(path), "cluster.fileroot")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in scalars.items()}
        self.append((json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n").encode())


class TensorBoard(_ScalarFile):
    """Writes an event file into `folder`. Each scalar is on the disk when `log` returns.

    suffix: the end of the file's name.
    """

    def __init__(self, folder: str | Path, suffix: str = ""):
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}{suffix}"
        super().__init__(Path(folder).expanduser() / name, "stats_logger.tensorboard.path")
        self._resumed_step: int | None = None

    def resume(self, step: int) -> None:
        super().resume(step)
        self._resumed_step = step

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[attr-defined]  # protobuf makes it
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]  # protobuf makes it

        if not self.size:
            self._append_event(file_version="brain.Event:2")
        if self._resumed_step is not None:  # a TensorBoard that has read later steps drops them
            self._append_event(step=self._resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._resumed_step = None
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars.items()]
        self._append_event(step=step, summary=Summary(value=values))

    def _append_event(self, **fields: Any) -> None:
        # TensorBoard's own event writer has a thread, and errors get lost there.
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]  # protobuf makes it
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.append(buffer.getvalue())
