"""Scalars in TensorBoard event files."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno.tracking.growing_file import GrowingFile
from areno.tracking.tracker import Tracker


class TensorBoard(Tracker):
    """Writes an event file into `folder`. Each scalar is on the disk when `log` returns.

    ArenoError, with the setting, if the file cannot be written.
    """

    def __init__(self, folder: str | Path):
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(Path(folder).expanduser() / name, "stats_logger.tensorboard.path")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]  # protobuf makes it

        if not self._file.size:
            self._file.append(_record(file_version="brain.Event:2"))
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars.items()]
        self._file.append(_record(step=step, summary=Summary(value=values)))

    def finish(self) -> None:
        self._file.close()


def _record(**fields: Any) -> bytes:
    """An event as the file holds it. TensorBoard's own event writer has a thread, and errors get lost there."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]  # protobuf makes it
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()
