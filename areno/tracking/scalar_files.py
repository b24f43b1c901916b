"""Trackers that write scalars to files: JSON lines, and event files for TensorBoard."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from areno.errors import ArenoError, Problem
from areno.tracking.tracker import Tracker
from areno.types import ScoredSample

_TEXTS, _TEXT_CHARS = 3, 1000  # samples of a step in TensorBoard, and characters of prompt and completion
_HPARAM_TYPES = (bool, int, float, str)


class _ScalarFile(Tracker):
    """Base class for a file of records. The file is made with the first record, and never holds a partial record.

    Errors name `key`, the setting for the file's folder. `size` is in bytes.
    """

    def __init__(self, path: Path, key: str):
        self.path, self.key = path, key
        self.size = 0  # bytes
        self._file: BinaryIO | None = None
        if path.parent.exists() and not path.parent.is_dir():
            raise ArenoError(Problem(key, "{} is not a folder; set another one", path.parent))
        with self._name_setting_in_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def append(self, record: bytes) -> None:
        """Append a record. If writing fails, as on a full disk, truncate the file to its last complete record."""
        with self._name_setting_in_errors():
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
        """Close the file so that the next record reopens it, because the file may have been truncated."""
        self.finish()
        self.size = self.path.stat().st_size if self.path.exists() else 0

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    @contextmanager
    def _name_setting_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = "{} cannot be written: {}; free space there or set another folder"
            raise ArenoError(Problem(self.key, text, self.path, error.strerror)) from error


class Jsonl(_ScalarFile):
    """Writes one JSON line per call of `log`: "step", "time" (in seconds since 1970) and the scalars by name.

    A scalar that is NaN or infinite is written as null.
    """

    def __init__(self, path: str | Path):
        super().__init__(Path(path), "cluster.fileroot")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in scalars.items()}
        self.append((json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n").encode())


class TensorBoard(_ScalarFile):
    """Writes scalars and some samples to an event file for TensorBoard. `log` returns after the scalars are written.

    `suffix` ends the file's name and tells apart runs that share a folder. The tab HPARAMS shows `settings`, which has
    values by dotted name.
    """

    def __init__(self, folder: str | Path, suffix: str = "", settings: Mapping[str, Any] = MappingProxyType({})):
        folder = Path(folder).expanduser()
        # TensorBoard reads files in the order of their names. So the time in the name ascends, even if a clock was
        # set back.
        names = [path.name.split(".") for path in folder.glob(f"events.out.tfevents.*.*{suffix}")]
        begun = max([time.time(), *(int(name[3]) + 1.0 for name in names if name[3].isdecimal())])
        name = f"events.out.tfevents.{begun:.6f}.{socket.gethostname()}.{os.getpid()}{suffix}"
        super().__init__(folder / name, "stats_logger.tensorboard.path")
        self._resumed_step: int | None = None
        self._settings = settings

    def resume(self, step: int) -> None:
        """Make the next record tell TensorBoard to drop all steps after `step`."""
        super().resume(step)
        self._resumed_step = step
        if step:  # an earlier session has written the settings
            self._settings = {}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]  # protobuf makes it

        self._append_summary(
            step, Summary(value=[Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars.items()])
        )

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        self._append_texts(step, "samples", samples)

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        self._append_texts(step, f"eval_samples/{name}" if name else "eval_samples", samples)

    def _append_texts(self, step: int, tag: str, samples: Sequence[ScoredSample]) -> None:
        """Write one sample for each of the first _TEXTS prompts, all together as one text."""
        first = {sample.group: sample for sample in reversed(samples)}
        shown = sorted(first.values(), key=lambda sample: sample.group)[:_TEXTS]
        if shown:
            self._append_summary(step, _text_summary(tag, "\n\n---\n\n".join(map(_markdown, shown))))

    def _append_summary(self, step: int, summary: Any) -> None:
        """Write a summary. An empty file first gets the format's version and the settings."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[attr-defined]  # protobuf makes it
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        if not self.size:
            self._append_event(file_version="brain.Event:2")
            if known := {name: value for name, value in self._settings.items() if isinstance(value, _HPARAM_TYPES)}:
                self._append_event(summary=hparams_pb(known))
        if self._resumed_step is not None:  # TensorBoard drops the later steps that it has read
            self._append_event(step=self._resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._resumed_step = None
        self._append_event(step=step, summary=summary)

    def _append_event(self, **fields: Any) -> None:
        # TensorBoard's own event writer has a thread, which loses errors.
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]  # protobuf makes it
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.append(buffer.getvalue())


def _text_summary(tag: str, text: str) -> Any:
    """Return a summary for the tab TEXT. TensorBoard's own function needs TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[attr-defined]
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[attr-defined]
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[attr-defined]
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData  # type: ignore[attr-defined]

    plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[text.encode("utf-8", "replace")],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])


def _markdown(sample: ScoredSample) -> str:
    """Format a sample with prompt and completion as indented blocks, which TensorBoard shows verbatim."""
    outcome = sample.outcome
    parts = "".join(f", {name} {value:.4g}" for name, value in outcome.parts.items())
    reward = outcome.status if outcome.value is None else f"{outcome.value:.4g}{parts}"
    texts = (("prompt", sample.item.text), ("completion", sample.completion))
    blocks = (
        f"{name}\n\n" + "\n".join(f"    {line}" for line in _truncated_text(text).splitlines()) for name, text in texts
    )
    return "\n\n".join([f"**reward {reward}**", *blocks])


def _truncated_text(text: str) -> str:
    return text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]}..."
