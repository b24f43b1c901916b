"""Numbers of a run: what they are (rollout/*), and where they go (TensorBoard and a JSON-lines file).

rollout/accuracy is the share of scored samples whose reward is at least 1.0, the value that stands for a right answer;
partial credit below it does not count.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from areno.api.types import ScoredSample

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
    if not samples:
        return {"rollout/num_sequences": 0.0, "rollout/skipped_long": float(skipped_long)}
    scored = np.array([sample.outcome.value is not None for sample in samples])
    rewards = np.array(
        [sample.outcome.value for sample in samples if sample.outcome.value is not None], dtype=np.float64
    )
    prompts = np.array([len(sample.item.tokens) for sample in samples], dtype=np.float64)
    responses = np.array([len(sample.sequence.resp_tokens) for sample in samples], dtype=np.float64)
    n_tokens = responses.sum()
    stats = {
        **_moments("rewards", rewards, ("mean", "std", "max", "min")),
        **_moments("advantages", np.asarray(advantages, dtype=np.float64)[scored], ("mean", "std")),
        "seq_len_mean": (prompts + responses).mean(),
        "prompt_len_mean": prompts.mean(),
        "response_len_mean": responses.mean(),
        "num_sequences": len(samples),
        "truncated": np.mean([sample.sequence.finish_reason == "length" for sample in samples]),
        "reward_timeouts": sum(sample.outcome.status == "timeout" for sample in samples),
        "reward_errors": sum(sample.outcome.status == "error" for sample in samples),
        "skipped_long": skipped_long,
    }
    if len(rewards):
        stats["accuracy"] = accuracy(rewards)
    if n_tokens:
        stats["logprobs_mean"] = sum(math.fsum(sample.sequence.resp_logprobs) for sample in samples) / n_tokens
    if total_skipped_long is not None:
        stats["total_skipped_long"] = total_skipped_long
    return {f"rollout/{name}": float(value) for name, value in stats.items()}


def accuracy(rewards: Sequence[float] | np.ndarray) -> float:
    """Share of rewards that stand for a right answer: 1.0 or more. NaN for no rewards."""
    return float(np.mean(np.asarray(rewards) >= _RIGHT)) if len(rewards) else math.nan


def with_prefix(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    """`{"loss": 1.0}` under "train" is `{"train/loss": 1.0}`."""
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}


def _moments(name: str, values: np.ndarray, wanted: Sequence[str]) -> dict[str, float]:
    return {f"{name}_{what}": getattr(values, what)() for what in wanted} if len(values) else {}


class MetricsRecorder:
    """Writes scalars. path: folder for TensorBoard event files; jsonl: file that gets one line for each call; None =
    not.

    Every line of the file is {"step", "time" (seconds since 1970), and the scalars}; what is not finite is written as
    null.
    """

    def __init__(self, path: str | Path | None = None, jsonl: str | Path | None = None):
        self._writer: Any = None
        self._file: Any = None
        if path is not None:
            # Here, since it takes a quarter of a second.
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            Path(path).mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(path))
        if jsonl is not None:
            Path(jsonl).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(jsonl, "a", encoding="utf-8")  # noqa: SIM115  # closed by close()

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step, named <namespace>/<name>, and make them visible at once."""
        if self._writer is not None:
            self._writer.add_event(_event(step, scalars))
            self._writer.flush()
        if self._file is not None:
            finite = {name: float(value) if math.isfinite(value) else None for name, value in scalars.items()}
            self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        writer, self._writer = self._writer, None
        file, self._file = self._file, None
        if writer is not None:
            writer.close()
        if file is not None:
            file.close()

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _event(step: int, scalars: Mapping[str, float]) -> Any:
    """TensorBoard's record of a step. As plain values, which all readers know; its own Writer makes tensors of them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars.items()]
    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))
