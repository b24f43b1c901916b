"""Numbers of a run: what they are (rollout/*), and where they go (TensorBoard and a JSON-lines file).

rollout/accuracy is the share of scored samples whose reward is at least 1.0, the value that stands for a right answer;
partial credit below it does not count.
"""

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
from types import TracebackType
from typing import Any

import numpy as np

from areno.api.types import ScoredSample
from areno.engine.types import TrainSequence
from areno.errors import ArenoError

_RIGHT = 1.0 - 1e-6


def rollout_metrics(
    samples: Sequence[ScoredSample],
    advantages: Sequence[float] | np.ndarray,
    *,
    skipped_long: int = 0,
    total_skipped_long: int | None = None,
) -> dict[str, float]:
    """The rollout/* scalars of one step. `advantages`: one for each sample. Lengths are in tokens.

    Rewards and advantages are over the samples that have a reward; logprobs_mean is over all response tokens. What has
    no value, such as the mean of no rewards, is left out.
    """
    scored = [sample.outcome.value is not None for sample in samples]
    stats = _sample_stats(
        prompts=[len(sample.item.tokens) for sample in samples],
        responses=[len(sample.sequence.resp_tokens) for sample in samples],
        logprobs=[math.fsum(sample.sequence.resp_logprobs) for sample in samples],
        rewards=[sample.outcome.value for sample in samples if sample.outcome.value is not None],
        advantages=np.asarray(advantages, dtype=np.float64)[np.array(scored, dtype=bool)],
    )
    if samples:
        stats |= {
            "truncated": float(np.mean([sample.sequence.finish_reason == "length" for sample in samples])),
            "reward_timeouts": sum(sample.outcome.status == "timeout" for sample in samples),
            "reward_errors": sum(sample.outcome.status == "error" for sample in samples),
        }
    stats["skipped_long"] = skipped_long
    if total_skipped_long is not None:
        stats["total_skipped_long"] = total_skipped_long
    return with_prefix("rollout", stats)


def row_metrics(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """The rollout/* scalars that training rows tell of; none where rows have no log-probabilities of a rollout.

    The prompt of a row is what comes before its first trained token; the response are its trained tokens. A row's
    advantage is the mean over these.
    """
    if any(row.logprobs is None for row in rows):
        return {}
    trained = [~np.asarray(row.prompt_mask, dtype=bool) for row in rows]
    return with_prefix(
        "rollout",
        _sample_stats(
            prompts=[int(mask.argmax()) if mask.any() else len(mask) for mask in trained],
            responses=[int(mask.sum()) for mask in trained],
            logprobs=[float(np.asarray(row.logprobs)[mask].sum()) for row, mask in zip(rows, trained, strict=True)],
            rewards=[row.reward for row in rows],
            advantages=[
                float(np.asarray(row.advantages)[mask].mean())
                for row, mask in zip(rows, trained, strict=True)
                if row.advantages is not None and mask.any()
            ],
            lengths=[len(mask) for mask in trained],
        ),
    )


def _sample_stats(
    *,
    prompts: Sequence[int],
    responses: Sequence[int],
    logprobs: Sequence[float],
    rewards: Sequence[float],
    advantages: Sequence[float] | np.ndarray,
    lengths: Sequence[int] | None = None,
) -> dict[str, float]:
    """Per sample: tokens of prompt and response, sum of the response's log-probabilities, all tokens where those are
    more than the two. Rewards and advantages of those that have one."""
    stats: dict[str, float] = {"num_sequences": len(prompts)}
    if not prompts:
        return stats
    both = np.add(prompts, responses) if lengths is None else lengths
    for name, values in (("seq_len", both), ("prompt_len", prompts), ("response_len", responses)):
        stats[f"{name}_mean"] = float(np.mean(values))
    stats |= _moments("rewards", rewards, ("mean", "std", "max", "min"))
    stats |= _moments("advantages", advantages, ("mean", "std"))
    if len(rewards):
        stats["accuracy"] = accuracy(rewards)
    if n_tokens := sum(responses):
        stats["logprobs_mean"] = math.fsum(logprobs) / n_tokens
    return stats


def accuracy(rewards: Sequence[float] | np.ndarray) -> float:
    """Share of rewards that stand for a right answer: 1.0 or more. NaN for no rewards."""
    return float(np.mean(np.asarray(rewards) >= _RIGHT)) if len(rewards) else math.nan


def with_prefix(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    """`{"loss": 1.0}` under "train" is `{"train/loss": 1.0}`."""
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}


def _moments(name: str, values: Sequence[float] | np.ndarray, wanted: Sequence[str]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    return {f"{name}_{what}": float(getattr(array, what)()) for what in wanted} if len(array) else {}


class MetricsRecorder:
    """Writes scalars. path: folder for TensorBoard event files; jsonl: file that gets one line for each call; None =
    not.

    Every line of the file is {"step", "time" (seconds since 1970), and the scalars}; what is not finite is written as
    null. Files come into being with the first scalars. ArenoError, naming the setting, where they cannot be written.
    """

    def __init__(self, path: str | Path | None = None, jsonl: str | Path | None = None):
        self._events: _GrowingFile | None = None
        self._lines: _GrowingFile | None = None
        if path is not None:
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self._events = _GrowingFile(Path(path).expanduser() / name, "stats_logger.tensorboard.path")
        if jsonl is not None:
            self._lines = _GrowingFile(Path(jsonl), "cluster.fileroot")

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step, named <namespace>/<name>, and make them visible at once."""
        now = time.time()
        if self._events is not None:
            if not self._events.size:
                self._events.append(_event(now, file_version="brain.Event:2"))
            self._events.append(_event(now, step, scalars))
        if self._lines is not None:
            finite = {name: float(value) if math.isfinite(value) else None for name, value in scalars.items()}
            line = json.dumps({"step": step, "time": round(now, 3), **finite}) + "\n"
            self._lines.append(line.encode())

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        for file in (self._events, self._lines):
            if file is not None:
                file.close()
        self._events = self._lines = None

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _GrowingFile:
    """A file that grows by whole records: of one that the disk has no room for, nothing stays. `key`: its setting."""

    def __init__(self, path: Path, key: str):
        self.path, self.key = path, key
        self.size = 0  # bytes
        self._file: Any = None
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def append(self, record: bytes) -> None:
        with self._explained():
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
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ArenoError(
                f"{self.key}: {self.path} cannot be written: {error.strerror}; free space there or set another folder"
            ) from error


def _event(now: float, step: int = 0, scalars: Mapping[str, float] | None = None, file_version: str = "") -> bytes:
    """A record of a TensorBoard event file. Its own writer has a thread, in which errors are lost."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]  # protobuf makes it
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from tensorboard.summary.writer.record_writer import RecordWriter

    if file_version:
        event = Event(wall_time=now, file_version=file_version)
    else:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in (scalars or {}).items()]
        event = Event(wall_time=now, step=step, summary=Summary(value=values))
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
